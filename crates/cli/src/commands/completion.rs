//! `windlass completion SHELL`: prints the script that makes a shell query this program for completions.

use clap_complete::env::Shells;

use crate::{complete, error::CliError, exit::Exit, output};

const EXAMPLES: &str = "\
Examples:
  bash        echo 'source <(windlass completion bash)' >> ~/.bashrc
  zsh         echo 'source <(windlass completion zsh)' >> ~/.zshrc
  fish        windlass completion fish > ~/.config/fish/completions/windlass.fish
  elvish      echo 'eval (windlass completion elvish | slurp)' >> ~/.config/elvish/rc.elv
  powershell  windlass completion powershell | Out-String | Invoke-Expression

Names of runs, fleets, projects and so on come from the server, if one is running; completion does not start one.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Shell to generate the script for
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
    Elvish,
    Powershell,
}

impl Shell {
    const fn name(self) -> &'static str {
        match self {
            Self::Bash => "bash",
            Self::Zsh => "zsh",
            Self::Fish => "fish",
            Self::Elvish => "elvish",
            Self::Powershell => "powershell",
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let shells = Shells::builtins();
    let name = args.shell.name();
    let shell = shells
        .completer(name)
        .ok_or_else(|| CliError::new(format!("failed to generate the completion script for {name}")))?;
    let mut script = Vec::new();
    // The script calls the program by name, so that it uses the first `windlass` in `PATH`, also after an update.
    shell
        .write_registration(complete::COMPLETE_VARIABLE, "windlass", "windlass", "windlass", &mut script)
        .map_err(|error| CliError::from_error("failed to generate the completion script", &error))?;
    output::write_raw(&script);
    Ok(Exit::Done)
}
