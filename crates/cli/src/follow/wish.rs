//! What the user wants of a run that is followed: interrupts, and the answer to the question they raise.

use std::io::{BufRead as _, Write as _};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{output, problem::Problem};

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// Ctrl-C, which may mean several things.
    Interrupt,
    Stop,
    Abort,
    /// The run goes on without us.
    Detach,
    /// The run is ending, and nobody wants to wait for it.
    Leave,
}

/// How far the run was asked to end already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    No,
    Stopping,
    Aborting,
}

pub(super) struct Wish {
    interrupt: Signal,
    terminate: Signal,
    ending: Ending,
}

impl Wish {
    pub(super) fn listen() -> Result<Self, Problem> {
        let failed = |error: std::io::Error| Problem::caused("listen for signals", &error);
        Ok(Self {
            interrupt: signal(SignalKind::interrupt()).map_err(failed)?,
            terminate: signal(SignalKind::terminate()).map_err(failed)?,
            ending: Ending::No,
        })
    }

    /// The run was told to end.
    pub(super) fn stopping(&mut self, abort: bool) {
        self.ending = if abort { Ending::Aborting } else { Ending::Stopping };
    }

    /// The next thing that is wanted. May be given up at any time.
    pub(super) async fn next(&mut self) -> Asked {
        let is_interrupt = tokio::select! {
            _ = self.interrupt.recv() => true,
            _ = self.terminate.recv() => false,
        };
        match self.ending {
            Ending::No if is_interrupt => Asked::Interrupt,
            Ending::No => Asked::Stop,
            Ending::Stopping => Asked::Abort,
            Ending::Aborting => Asked::Leave,
        }
    }

    /// Asks; a second interrupt detaches. Nothing else is written meanwhile.
    pub(super) async fn ask(&mut self, question: &str) -> Asked {
        let question = question.to_owned();
        // A thread that waits for a line which never comes ends with the process.
        let answer = tokio::task::spawn_blocking(move || read(&question));
        tokio::select! {
            answer = answer => answer.unwrap_or(Asked::Detach),
            _ = self.interrupt.recv() => {
                output::say("");
                Asked::Detach
            }
            _ = self.terminate.recv() => {
                output::say("");
                Asked::Stop
            }
        }
    }
}

/// The end of the input detaches: it harms nothing.
fn read(question: &str) -> Asked {
    loop {
        {
            let mut out = std::io::stderr().lock();
            let _ = write!(out, "\n{} ", output::printable(question)).and_then(|()| out.flush());
        }
        let mut answer = String::new();
        match std::io::stdin().lock().read_line(&mut answer) {
            Ok(0) | Err(_) => return Asked::Detach,
            Ok(_) => {}
        }
        match answer.trim().to_ascii_lowercase().as_str() {
            "s" | "stop" => return Asked::Stop,
            "d" | "detach" => return Asked::Detach,
            _ => {}
        }
    }
}
