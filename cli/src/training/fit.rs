//! stopgap
use super::sampler::NetworkSampler;
use crate::data::Dataset;
use crate::error::CliError;
use crate::network::Network;

use rfdescent::Moments;
pub fn fit(network: &Network, data: &Dataset, seed: u64) -> Result<Moments, CliError> {
    let sampler = NetworkSampler::new(network, data);
    let mut stats = vec![];
    let mut s = seed * 1_000_000;
    for (b, n) in [(20u64, 600), (225, 300)] {
        let t = std::time::Instant::now();
        let mut l = vec![];
        let mut g = vec![];
        for _ in 0..n {
            s += 1;
            let (a, c) = sampler.draw(b, s)?;
            l.push(a);
            g.push(c);
        }
        let m = l.iter().sum::<f64>() / n as f64;
        let v = l.iter().map(|x| (x - m).powi(2)).sum::<f64>() / (n - 1) as f64;
        let gm = g.iter().sum::<f64>() / n as f64;
        eprintln!("b {b} n {n} mean {m} var {v} g {gm} time {:?}", t.elapsed());
        stats.push((1.0 / b as f64, m, v, gm));
    }
    let [a, b] = stats[..] else { unreachable!() };
    let noise = (a.2 - b.2) / (a.0 - b.0);
    let gnoise = (a.3 - b.3) / (a.0 - b.0);
    let m = Moments {
        mean: b.1,
        variance: b.2 - noise * b.0,
        noise_variance: noise,
        grad_variance: b.3 - gnoise * b.0,
        noise_grad_variance: gnoise,
        dims: network.dims(),
    };
    eprintln!("{m:?}");
    Ok(m)
}
