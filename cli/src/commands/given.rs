//! Which options of the fit a command line gives: those must not go with a method that has no fit, whatever their defaults.

use clap::error::Error;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};

/// Fields of [`TrainArgs`](super::train::TrainArgs) that only the fit, and steps from it, look at.
const FIT_OPTIONS: [&str; 6] =
    ["covariance", "anisotropy", "stochastic", "samples", "tolerance", "max_samples"];

/// The options of the fit that were given, as they are written.
#[derive(Debug)]
pub struct GivenFitOptions(pub Vec<String>);

impl FromArgMatches for GivenFitOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let given = |field: &&str| matches.value_source(field) == Some(ValueSource::CommandLine);
        let written = |field: &str| format!("--{}", field.replace('_', "-"));
        Ok(GivenFitOptions(FIT_OPTIONS.into_iter().filter(given).map(written).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// It reads other options and has none of its own.
impl Args for GivenFitOptions {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}
