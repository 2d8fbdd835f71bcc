mod common;
mod small_tasks;

use common::*;
use rfdescent::DType;
use rfdescent::optimizer::*;
use small_tasks::*;

fn clip(max: f64) -> impl Fn(&mut f64, &mut [Vec<f64>]) {
    move |_, g| {
        let norm = g.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
        if norm > max {
            g.iter_mut().flatten().for_each(|x| *x *= max / norm);
        }
    }
}

#[test]
fn measure() {
    for seed in [1, 2, 3] {
        let ce = Data::new(Loss::CrossEntropy, 1000 * seed);
        let t = Training::new(Loss::CrossEntropy);
        let plain = t.run(&ce, seed);
        let mut show = |name: &str, v: f64| println!("seed {seed} {name}: {v:.4} ratio {:.3}", v / plain);
        show("start", t.validation(&t.start(seed), &ce));
        show("plain", plain);
        show("long", Training { steps: 1600, ..t.clone() }.run(&ce, seed));
        for m in [0.3, 0.1] { let c = clip(m); show(&format!("clip {m}"), Training { meddling: &c, ..t.clone() }.run(&ce, seed)); }
        for m in [0.01, 0.001] { let c = move |_: &mut f64, g: &mut [Vec<f64>]| g.iter_mut().flatten().for_each(|x| *x = x.clamp(-m, m)); show(&format!("value {m}"), Training { meddling: &c, ..t.clone() }.run(&ce, seed)); }
        for m in [128.0, 1.0/128.0] { let c = move |_: &mut f64, g: &mut [Vec<f64>]| g.iter_mut().flatten().for_each(|x| *x *= m); show(&format!("scaled {m}"), Training { meddling: &c, ..t.clone() }.run(&ce, seed)); }
        for m in [1000.0, 1e-3] { let c = move |l: &mut f64, g: &mut [Vec<f64>]| { *l *= m; g.iter_mut().flatten().for_each(|x| *x *= m) }; show(&format!("both {m}"), Training { meddling: &c, ..t.clone() }.run(&ce, seed)); }
        { let c = |l: &mut f64, _: &mut [Vec<f64>]| *l += 10.0; show("offset", Training { meddling: &c, ..t.clone() }.run(&ce, seed)); }
        { let c = |l: &mut f64, _: &mut [Vec<f64>]| *l -= 10.0; show("offset -10", Training { meddling: &c, ..t.clone() }.run(&ce, seed)); }
        for k in 0..TENSORS {
            if k % 2 == 0 {
            for m in [0.0, 0.25] {
                let options = Options { groups: vec![Group::default(), Group { multiplier: m, ..Group::default() }], ..Options::default() };
                show(&format!("multiplier {m} on {k}"), Training { options, apart: Some(k), ..t.clone() }.run(&ce, seed));
            }
            show(&format!("frozen {k}"), Training { frozen: Some(k), ..t.clone() }.run(&ce, seed));
            }
        }
        for d in [0.01, 0.1, 1.0] {
            let options = Options { groups: vec![Group { weight_decay: d, ..Group::default() }], ..Options::default() };
            show(&format!("decay {d}"), Training { options, ..t.clone() }.run(&ce, seed));
        }
        for (dtype, master) in [(DType::BF16, true), (DType::BF16, false)] {
            let options = Options { master_weights: master, ..Options::default() };
            show(&format!("bf16 {master}"), Training { options, dtype, ..t.clone() }.run(&ce, seed));
        }
        // fork
        let other = Data::new(Loss::CrossEntropy, 1000 * seed + 500);
        let (mut o, mut v) = (t.optimizer(), t.start(seed));
        t.go_on(&mut o, &mut v, &ce, seed);
        let state = o.state_to_bytes().unwrap();
        let mut o2 = t.optimizer();
        o2.load_state_from_bytes(&state).unwrap();
        println!("fork starts {:.4}", t.validation(&v, &other));
        let mut v2 = v.clone();
        let reports = t.go_on(&mut o2, &mut v2, &other, seed + 9);
        println!("fork loaded {:.4} fresh weights {:.4}", t.validation(&v2, &other), t.run(&other, seed));
        let mut v3 = v.clone();
        t.go_on(&mut t.optimizer(), &mut v3, &other, seed + 9);
        println!("fork fresh optimizer {:.4}; trust {:?}", t.validation(&v3, &other), reports.iter().step_by(16).map(|r| r.trust).collect::<Vec<_>>());
        for loss in [Loss::Squared, Loss::Huber, Loss::Absolute] {
            let mut data = Data::new(loss, 1000 * seed);
            let t = Training::new(loss);
            let plain = t.run(&data, seed);
            println!("seed {seed} {loss:?} start {:.5}", t.validation(&t.start(seed), &data));
            data.labels[17] = 1e4;
            println!("seed {seed} {loss:?} plain {plain:.5} outlier {:.5}", t.run(&data, seed));
        }
        let data = Data::new(Loss::Gaussian, 1000 * seed);
        let t = Training::new(Loss::Gaussian);
        println!("seed {seed} gaussian start {:.4} end {:.4} long {:.4}", t.validation(&t.start(seed), &data), t.run(&data, seed), Training { steps: 1600, ..t.clone() }.run(&data, seed));
    }
}
