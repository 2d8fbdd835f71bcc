//! Foreign samples.
use rfdescent::estimation::*;
#[test]
fn probe() {
    let dir = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../shared"));
    let mut files: Vec<_> = std::fs::read_dir(dir.join("data/covariance"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "csv"))
        .collect();
    files.sort();
    files.push(dir.join("cases/outliers.csv"));
    for path in files {
        let table = SampleTable::read(&path).unwrap();
        let t = std::time::Instant::now();
        let f = table.findings();
        println!("{:?} n={} {:?}\n   {}", path.file_name().unwrap(), table.samples.len(), t.elapsed(), f);
        match table.fit(&FitOptions::default()) {
            Ok(fit) => println!("   {:?}\n  {:?}", fit.fit, fit.without_foreign),
            Err(e) => println!("   {e}"),
        }
    }
}
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

struct Random(ChaCha8Rng);

impl Random {
    fn new(seed: u64) -> Self {
        Random(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Uniform in (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

fn simulated(seed: u64, n: usize, dims: usize, sizes: &[u64]) -> Vec<Sample> {
    let mut random = Random::new(seed);
    (0..n)
        .map(|i| {
            let batch_size = sizes[i % sizes.len()];
            let inverse = 1.0 / batch_size as f64;
            let loss = 2.7 + random.normal() * (0.01 + 0.85 * inverse).sqrt();
            let chi2: f64 = (0..dims).map(|_| random.normal().powi(2)).sum();
            Sample { loss, sq_grad_norm: (500.0 + 9e4 * inverse) * chi2 / dims as f64, batch_size }
        })
        .collect()
}
#[test]
fn alarms() {
    let many: Vec<u64> = (0..60).map(|i| (20.0 * 1.08f64.powi(i)) as u64).collect();
    for (name, sizes) in
        [("7", &[20, 50, 100, 200, 400, 800, 1600][..]), ("2", &[20, 1000][..]), ("many", &many[..])]
    {
        for (n, runs) in [(10, 4000), (20, 4000), (50, 4000), (200, 2000), (1000, 500)] {
            for dims in [3, 30] {
                let mut counts = [0; 4];
                for seed in 0..runs {
                    let f = SampleTable::from(simulated(seed, n, dims, sizes)).findings();
                    counts[0] += f.foreign.iter().any(|f| f.quantity == Quantity::Loss) as u32;
                    counts[1] += f.foreign.iter().any(|f| f.quantity == Quantity::GradNorm) as u32;
                    counts[2] += f.populations.is_some() as u32;
                    counts[3] += !f.shifted.is_empty() as u32;
                }
                println!("{name} n {n} dims {dims} runs {runs}: {counts:?}");
            }
        }
    }
}
