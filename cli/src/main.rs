//! `rfdescent`: fit covariance models, compute step sizes, plan samples, train networks.

mod bench;
mod commands;
mod data;
mod error;
mod input;
mod interrupt;
mod network;
mod numbers;
mod output;
mod plot;
mod progress;
mod seed;
mod terminal;
mod training;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

use commands::{bench as benchmark, doctor, fit, plan, shell, step_size, train};
use error::CliError;

/// Training allocates and frees hundreds of megabytes a second in large pieces, which the system's allocator
/// hands back to the kernel each time: a third of the run time went into page faults.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Random Function Descent: step sizes from the statistics of the cost, no learning rate to tune
#[derive(Parser)]
#[command(version, name = "rfdescent")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(train::TrainArgs),
    Fit(fit::FitArgs),
    StepSize(step_size::StepSizeArgs),
    Plan(plan::PlanArgs),
    Doctor(doctor::DoctorArgs),
    Bench(benchmark::BenchArgs),
    Completions(shell::CompletionsArgs),
    Man(shell::ManArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return explain(&error),
    };
    let result = match cli.command {
        Command::Train(args) => train::run(&args),
        Command::Fit(args) => fit::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::StepSize(args) => step_size::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Bench(args) => benchmark::run(&args),
        Command::Completions(args) => shell::completions(&args, Cli::command()),
        Command::Man(args) => shell::man(&args, Cli::command()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn fail(error: &CliError) -> ExitCode {
    terminal::say(format_args!("error: {error}"));
    ExitCode::from(error.exit_code())
}

/// Help and version as clap prints them; a usage error as one line instead of clap's paragraph.
fn explain(error: &clap::Error) -> ExitCode {
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        return match terminal::printed(error.print()) {
            Ok(()) => ExitCode::from(error.exit_code() as u8),
            Err(error) => fail(&error),
        };
    }
    let text = error.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let line: Vec<&str> =
        lines.filter(|line| !line.is_empty() && !line.starts_with("For more information")).collect();
    fail(&CliError::Usage(line.join(" ").trim_start_matches("error: ").to_owned()))
}
