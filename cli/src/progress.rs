//! Progress bars on standard error; silent when it is not a terminal or when JSON was asked for.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Makes the bars of one command.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    shown: bool,
}

impl Progress {
    /// `quiet` switches every bar off.
    pub fn new(quiet: bool) -> Self {
        Progress { shown: !quiet && std::io::stderr().is_terminal() }
    }

    /// A bar of `length` units with a label before it and a changing message behind.
    pub fn bar(self, length: u64, label: &str) -> ProgressBar {
        let target = if self.shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template("{prefix:24} {bar:32} {pos}/{len} {elapsed} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::with_draw_target(Some(length), target).with_style(style).with_prefix(label.to_owned())
    }
}
