//! One optimizer step on a CUDA device: GPU time by events, host time of the call, and the card's own
//! ceilings in the same run.
//!
//! ```text
//! cargo bench --bench device [-- [FILTER] [--json FILE] [--quick] [--start]]
//! ```
//!
//! Each row: median GPU time of one step in µs, bytes moved (16 a parameter in f32), and the ratio to the
//! floor: the time that those bytes need at the rate of a kernel that reads, then reads, reads and writes and
//! does nothing else. The stream is kept busy while the host queues a step, so its time is the device's
//! alone. "cold": other memory was read before each step, so that the second-level cache holds nothing of it
//! and has nothing to write back, and short lists take turns with others of their kind. Every row is checked:
//! the outcome, the norm against f64 sums, and, of the fitted method without momentum, a sample of
//! parameters after the first step.
//!
//! FILTER: rows whose name contains it, or is it where it begins with `=`. FILE gets each row as JSON, a line
//! each. `--quick`: short lists and few runs, for a look whether all of it works. `--start`: no rows, but the
//! time from nothing to a device, and to the first step of each kind.
//! Prints a skip without a device; RFDESCENT_REQUIRE_GPU=1 makes that a failure.

#[cfg(feature = "cuda")]
mod support {
    pub mod clock;
    pub mod lists;
    pub mod model;
    pub mod rows;
    pub mod values;
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("skipped: this build has no CUDA; enable the feature `cuda`");
}

#[cfg(feature = "cuda")]
fn main() {
    let start = std::time::Instant::now();
    match rfdescent::cuda::device(0) {
        Ok(device) => bench::run(&device, start.elapsed()),
        Err(error) if std::env::var("RFDESCENT_REQUIRE_GPU").is_ok_and(|value| value == "1") => {
            panic!("RFDESCENT_REQUIRE_GPU=1, but: {error}")
        }
        Err(error) => println!("skipped: {error}"),
    }
}

#[cfg(feature = "cuda")]
mod bench {
    use std::fs::File;
    use std::io::Write;

    use std::time::{Duration, Instant};

    use rfdescent::device::{Device, Stream};
    use serde::Serialize;

    use super::support::clock::{Amount, Clock};
    use super::support::lists;
    use super::support::rows::{Kind, Patterns, Row};

    /// Which rows, how much, and where they go.
    struct Arguments {
        filter: String,
        json: Option<File>,
        amount: Amount,
        start: bool,
    }

    impl Arguments {
        fn parse() -> Self {
            let mut parsed = Self { filter: String::new(), json: None, amount: Amount::FULL, start: false };
            let mut given = std::env::args().skip(1);
            while let Some(argument) = given.next() {
                match argument.as_str() {
                    // From cargo.
                    "--bench" => {}
                    "--quick" => parsed.amount = Amount::QUICK,
                    "--start" => parsed.start = true,
                    "--json" => {
                        let file = given.next().expect("--json needs a file's name");
                        parsed.json = Some(File::create(&file).expect("the file of --json can be written"));
                    }
                    option if option.starts_with('-') => {
                        panic!("{option}: --json FILE, --quick, or a row's name")
                    }
                    _ => parsed.filter = argument,
                }
            }
            parsed
        }

        fn takes(&self, row: &Row<'_>) -> bool {
            // 10⁹ parameters once; formats in turn where there are several tensors.
            let repeated = row.list.ends_with("1e9") && row.kind.name != "f32";
            let alone = row.kind.mixed && row.places.len() == 1;
            match self.filter.strip_prefix('=') {
                Some(exact) => row.name() == exact,
                None => {
                    let short = row.parameters() <= self.amount.largest;
                    row.name().contains(&self.filter) && short && !repeated && !alone
                }
            }
        }

        fn write(&mut self, value: &impl Serialize) {
            if let Some(file) = &mut self.json {
                let line = serde_json::to_string(value).expect("numbers and names");
                writeln!(file, "{line}").expect("the file of --json can be written");
            }
        }
    }

    /// Seconds that opening the device took, and those of the first step of each kind of kernel, with making
    /// its optimizer and loading its code.
    #[derive(Serialize)]
    struct Start<'a> {
        device: &'a str,
        open_s: f64,
        first_step_s: Vec<(&'static str, f64)>,
    }

    fn start(device: &Device, opened: Duration, arguments: &mut Arguments) {
        let patterns = Patterns::new();
        let mut first_step_s = Vec::new();
        for kind in Kind::all() {
            let row = Row::new("", &[1000, 1000], kind);
            let list = row.list(device, &patterns, Stream::DEFAULT).expect("the device holds 2000 numbers");
            let start = Instant::now();
            let mut optimizer = row.optimizer(device).expect("the device holds 2000 numbers");
            list.step(&mut optimizer, Stream::DEFAULT);
            device.synchronize(Stream::DEFAULT).unwrap();
            println!("first step, {:<26} {:>9.1} ms", kind.name, start.elapsed().as_secs_f64() * 1e3);
            first_step_s.push((kind.name, start.elapsed().as_secs_f64()));
        }
        arguments.write(&Start { device: &device.name(), open_s: opened.as_secs_f64(), first_step_s });
    }

    pub fn run(device: &Device, opened: Duration) {
        let mut arguments = Arguments::parse();
        println!("{}", device.name());
        println!("opened in {:.1} ms", opened.as_secs_f64() * 1e3);
        if arguments.start {
            start(device, opened, &mut arguments);
        } else {
            rows(device, &mut arguments);
        }
    }

    fn rows(device: &Device, arguments: &mut Arguments) {
        let clock = Clock::new(device, arguments.amount);
        let patterns = Patterns::new();
        let (ceiling, copy) = (clock.step_ceiling(device), clock.copy_ceiling(device));
        println!("ceiling of read, then read, read, write: {:.0} GB/s", ceiling / 1e9);
        println!("ceiling of the driver's copy: {:.0} GB/s", copy / 1e9);
        println!("times in µs, medians of {}; floor: the bytes at the first ceiling", clock.amount.repeats);
        arguments.write(&serde_json::json!({
            "device": device.name(), "ceiling_bytes_per_s": ceiling, "copy_bytes_per_s": copy,
        }));
        println!(
            "{:<36} {:<21} {:>11} {:>12} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7}",
            "list", "kernels", "parameters", "bytes", "warm", "cold", "floor", "warm/f", "cold/f", "host"
        );
        let mut all: Vec<(String, Vec<usize>)> =
            (4..=9).map(|e| (format!("flat 1e{e}"), vec![10_usize.pow(e)])).collect();
        all.push(("100 of 1000".into(), vec![1000; 100]));
        all.push(("M7".into(), lists::m7()));
        all.push(("ResNet-50".into(), lists::resnet50()));
        all.push(("GPT-2 124M".into(), lists::gpt2()));
        all.push(("Llama 1.1B".into(), lists::llama()));
        let mut found = false;
        for kind in Kind::all() {
            for (list, lengths) in &all {
                let row = Row::new(list, lengths, kind);
                if !arguments.takes(&row) {
                    continue;
                }
                found = true;
                let Some(figures) = row.run(device, &clock, &patterns, ceiling) else {
                    println!("{:<36} skipped: the device has not enough memory", row.name());
                    continue;
                };
                println!(
                    "{:<36} {:<21} {:>11} {:>12} {:>9.1} {:>9.1} {:>9.1} {:>7.3} {:>7.3} {:>7.1}",
                    row.name(),
                    figures.kernels,
                    figures.parameters,
                    figures.bytes,
                    figures.warm_us,
                    figures.cold_us,
                    figures.floor_us,
                    figures.warm_us / figures.floor_us,
                    figures.cold_us / figures.floor_us,
                    figures.host_us
                );
                arguments.write(&figures);
            }
        }
        assert!(found, "no row's name is, or contains, {}", arguments.filter);
    }
}
