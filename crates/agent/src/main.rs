//! `windlass-agent`: what runs on machines. The shim, the runner and the executor arrive with their crates' code.

fn main() -> std::process::ExitCode {
    use std::io::Write;
    let version = env!("CARGO_PKG_VERSION");
    let arg = std::env::args().nth(1);
    let mut err = std::io::stderr();
    match arg.as_deref() {
        Some("--version" | "-V") => {
            let _ = writeln!(std::io::stdout(), "windlass-agent {version}");
            std::process::ExitCode::SUCCESS
        }
        _ => {
            let _ = writeln!(err, "windlass-agent {version}: shim, runner and exec are not built yet");
            std::process::ExitCode::from(2)
        }
    }
}
