//! `rfdescent completions` and `rfdescent man`: what shells and man make of the command line.

use std::fs;
use std::path::PathBuf;

use clap_complete::Shell;
use clap_mangen::Man;

use crate::error::CliError;
use crate::terminal::print;

/// Print a script that completes commands and options in a shell
///
/// Where shells look for it: ~/.local/share/bash-completion/completions/rfdescent (bash), _rfdescent in a
/// folder of $fpath (zsh), ~/.config/fish/completions/rfdescent.fish (fish).
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum, ignore_case = true)]
    shell: Shell,
}

/// Print the manual page, or write those of all commands to a folder
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Folder for rfdescent.1 and a page for each command, such as ~/.local/share/man/man1
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Runs `completions`.
pub fn completions(args: &CompletionsArgs, mut command: clap::Command) -> Result<(), CliError> {
    let mut script = Vec::new();
    let name = command.get_name().to_string();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Runs `man`.
pub fn man(args: &ManArgs, command: clap::Command) -> Result<(), CliError> {
    match &args.output {
        Some(folder) => fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(command, folder))
            .map_err(|error| CliError::io(folder, error)),
        None => {
            let mut page = Vec::new();
            // There is no page rfdescent-help(1).
            Man::new(command.disable_help_subcommand(true))
                .render(&mut page)
                .map_err(|error| CliError::Data(error.to_string()))?;
            print(&String::from_utf8_lossy(&page))
        }
    }
}
