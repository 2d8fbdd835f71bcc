//! `rfdescent doctor`: what this machine has, and where steps would run.

use rfdescent::cuda::{self, DeviceReport, Report};
use rfdescent::device::{Choice, Target};
use serde_json::json;

use crate::error::CliError;
use crate::numbers::count;
use crate::terminal::print;

/// Show what this machine has for steps: processor, CUDA driver, devices, and which of them is chosen.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command. A machine without CUDA is no error.
pub fn run(args: &DoctorArgs) -> Result<(), CliError> {
    let (report, choice) = (cuda::report(), Target::auto());
    print(&if args.json { to_json(&report, &choice) } else { to_text(&report, &choice) })
}

fn to_text(report: &Report, choice: &Choice) -> String {
    format!(
        "rfdescent {}\nCPU: {}, {}\n{report}choice: {choice}\n",
        env!("CARGO_PKG_VERSION"),
        count(rfdescent::threads(), "thread"),
        rfdescent::instructions()
    )
}

fn to_json(report: &Report, choice: &Choice) -> String {
    let devices: Vec<_> = report
        .devices
        .iter()
        .map(|DeviceReport { ordinal, title, usable }| {
            json!({
                "ordinal": ordinal,
                "title": title,
                "usable": usable.is_ok(),
                "name": usable.as_ref().ok(),
                "problem": usable.as_ref().err(),
            })
        })
        .collect();
    let device = match &choice.target {
        Target::Cpu => None,
        Target::Device(device) => Some(device.name()),
    };
    let value = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "threads": rfdescent::threads(),
        "instructions": rfdescent::instructions(),
        "cuda": {
            "driver": report.driver.as_ref().ok(),
            "problem": report.driver.as_ref().err(),
            "devices": devices,
        },
        "choice": {
            "target": if device.is_some() { "cuda" } else { "cpu" },
            "device": device,
            "reason": choice.reason,
        },
    });
    format!("{value:#}\n")
}
