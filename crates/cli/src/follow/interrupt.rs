//! Requests of a user who follows a run: interrupts, and the answer to the resulting prompt.

use std::io::{BufRead as _, Write as _};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{error::CliError, output};

/// A request of the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UserRequest {
    /// Ctrl-C, whose meaning depends on the answer to a prompt.
    Interrupt,
    Stop,
    Abort,
    /// Exit; the run continues.
    Detach,
    /// Exit while the run is stopping.
    StopWaiting,
}

/// Progress of the stop requests for the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopState {
    NotRequested,
    Stopping,
    Aborting,
}

pub(super) struct InterruptListener {
    interrupt: Signal,
    terminate: Signal,
    ending: StopState,
}

impl InterruptListener {
    pub(super) fn listen() -> Result<Self, CliError> {
        let failed = |error: std::io::Error| CliError::from_error("failed to listen for signals", &error);
        Ok(Self {
            interrupt: signal(SignalKind::interrupt()).map_err(failed)?,
            terminate: signal(SignalKind::terminate()).map_err(failed)?,
            ending: StopState::NotRequested,
        })
    }

    /// Records that the run was asked to stop.
    pub(super) fn set_stopping(&mut self, abort: bool) {
        self.ending = if abort { StopState::Aborting } else { StopState::Stopping };
    }

    /// Returns the next request. Cancel-safe.
    pub(super) async fn next(&mut self) -> UserRequest {
        let is_interrupt = tokio::select! {
            _ = self.interrupt.recv() => true,
            _ = self.terminate.recv() => false,
        };
        match self.ending {
            StopState::NotRequested if is_interrupt => UserRequest::Interrupt,
            StopState::NotRequested => UserRequest::Stop,
            StopState::Stopping => UserRequest::Abort,
            StopState::Aborting => UserRequest::StopWaiting,
        }
    }

    /// Prompts the user; a second interrupt detaches. No other output is written meanwhile.
    pub(super) async fn prompt(&mut self, question: &str) -> UserRequest {
        let question = question.to_owned();
        // A thread that waits for input ends with the process.
        let answer = tokio::task::spawn_blocking(move || read_choice(&question));
        tokio::select! {
            answer = answer => answer.unwrap_or(UserRequest::Detach),
            _ = self.interrupt.recv() => {
                output::print_message("");
                UserRequest::Detach
            }
            _ = self.terminate.recv() => {
                output::print_message("");
                UserRequest::Stop
            }
        }
    }
}

/// The end of the input detaches, because that is harmless.
fn read_choice(question: &str) -> UserRequest {
    loop {
        {
            let mut out = std::io::stderr().lock();
            let _ = write!(out, "\n{} ", output::printable(question)).and_then(|()| out.flush());
        }
        let mut answer = String::new();
        match std::io::stdin().lock().read_line(&mut answer) {
            Ok(0) | Err(_) => return UserRequest::Detach,
            Ok(_) => {}
        }
        match answer.trim().to_ascii_lowercase().as_str() {
            "s" | "stop" => return UserRequest::Stop,
            "d" | "detach" => return UserRequest::Detach,
            _ => {}
        }
    }
}
