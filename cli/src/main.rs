//! stopgap main
mod data;
mod error;
mod interrupt;
mod network;
mod output;
mod progress;
mod seed;
mod training;
use training::*;
#[global_allocator]
static A: mimalloc::MiMalloc = mimalloc::MiMalloc;
fn opts(i: f64) -> rfdescent::optimizer::Options { rfdescent::optimizer::Options { inv_batch_size: i, ..Default::default() } }
fn model(m: rfdescent::Moments) -> rfdescent::covariance::Model { rfdescent::covariance::Model::new(rfdescent::covariance::Family::SquaredExponential, m).unwrap() }
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let t = std::time::Instant::now();
    let data = if args[1] == "gen" {
        data::synthetic::generate(0, 60000, 10000)
    } else {
        data::idx::load(args[1].as_ref()).unwrap()
    };
    println!("data {:?}", t.elapsed());
    let kind = if args[2] == "cnn" {
        network::NetworkKind::Cnn
    } else {
        network::NetworkKind::Mlp
    };
    let seed: u64 = args[3].parse().unwrap();
    let net = network::Network::new(kind, DTYPE, seed).unwrap();
    let schedule = Schedule {
        epochs: 3,
        batch_size: 1024,
        seed,
    };
    let bar = indicatif::ProgressBar::hidden();
    let m = fit::fit(&net, &data, seed).unwrap();
    let mut show = |r: &EpochRow| println!("{r:?}");
    for s in &args[4..] {
        println!("{s}");
        net.initialise(seed).unwrap();
        let t = std::time::Instant::now();
        if s == "rfd" {
            train(
                &net,
                &data,
                &mut rfd::Rfd::new(&net, model(m), opts(0.0)).unwrap(),
                schedule,
                &bar,
                &mut show,
            )
            .unwrap();
        } else if s == "srfd" {
            train(
                &net,
                &data,
                &mut rfd::Rfd::new(&net, m, 1.0 / 1024.0).unwrap(),
                schedule,
                &bar,
                &mut show,
            )
            .unwrap();
        } else {
            for g in baseline::GRID {
                println!("{g:?}");
                net.initialise(seed).unwrap();
                train(
                    &net,
                    &data,
                    &mut baseline::Baseline::new(g, &net).unwrap(),
                    schedule,
                    &bar,
                    &mut show,
                )
                .unwrap();
            }
        }
        println!("{:?}", t.elapsed());
    }
}
