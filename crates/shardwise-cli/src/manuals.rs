//! `shardwise completions` and `shardwise man`: what shells and `man` know about the command.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;
use shardwise::error::ErrorKind;
use shardwise::{Error, Result};

/// The options of `shardwise completions`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardwise completions bash > /etc/bash_completion.d/shardwise
  shardwise completions zsh > ~/.zfunc/_shardwise
  shardwise completions fish > ~/.config/fish/completions/shardwise.fish")]
pub(crate) struct CompletionsOptions {
    /// The shell to write for
    shell: Shell,
}

/// Prints the completions of a shell.
pub(crate) fn completions(options: &CompletionsOptions, mut command: Command) -> Result<()> {
    // The generator panics where output fails, as in a closed pipe.
    let mut text = Vec::new();
    clap_complete::generate(options.shell, &mut command, "shardwise", &mut text);
    Ok(std::io::stdout().lock().write_all(&text)?)
}

/// The options of `shardwise man`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardwise man ~/.local/share/man/man1
  shardwise man . && man ./shardwise-train.1")]
pub(crate) struct ManOptions {
    /// Directory to write a page per command to; it is created
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Writes the pages of a command.
pub(crate) fn pages(options: &ManOptions, command: Command) -> Result<()> {
    let directory = &options.directory;
    let written = std::fs::create_dir_all(directory).and_then(|()| clap_mangen::generate_to(command, directory));
    written.map_err(|error| {
        let found = format!("{}: {error}", directory.display());
        ErrorKind::path(directory).error::<Error>(
            "man pages",
            found,
            "a directory that can be written to",
            "name another one",
        )
    })
}
