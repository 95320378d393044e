//! Follows a run: its progress, the output of its jobs, its ports, and its exit code at the end.
//!
//! Progress goes to stderr, output to stdout. A server that restarts is waited for, and every log continues at the byte
//! where it stopped.

pub(crate) mod deployment_status;
mod events;
mod exit_summary;
mod forward;
mod interrupt;
mod log_mux;
mod log_printer;
mod log_tail;
mod progress;
mod progress_tree;
pub(crate) mod ssh;

use std::time::Duration;

use tokio::time::Instant;
use windlass_api::{
    operations::{ReadRun, StopRuns},
    runs::{ReadRequest, Run, StopRequest},
};
use windlass_model::time::Timestamp;

use self::interrupt::{InterruptListener, UserRequest};
pub(crate) use self::{
    events::EventWriter,
    exit_summary::indent_lines,
    forward::{ForwardSpec as Ports, PortForwards},
    log_mux::{LogMux, OutputMode, PumpEnd},
    log_printer::LogPrinter,
    log_tail::{LogChunk, LogPages, LogRange, LogTail, PollBackoff, find_last_lines},
    progress::{JobProgress, job_progress},
    progress_tree::ProgressTree,
};
use crate::{
    cli::ServerArgs,
    commands::is_finished,
    context::{Context, run_name},
    error::CliError,
    exit::Exit,
    output::{
        self,
        style::{Colour, Style},
    },
};

/// Frame interval of the progress tree.
const FRAME_INTERVAL: Duration = Duration::from_millis(100);

/// Options for following a run.
pub(crate) struct FollowOptions {
    /// Output format; `None` prints no output.
    pub(crate) output: Option<OutputMode>,
    pub(crate) since: Option<Timestamp>,
    pub(crate) forwards: Option<PortForwards>,
    /// True if an interrupt may stop the run. Otherwise it only detaches.
    pub(crate) may_stop: bool,
    /// SSH access to a job, if requested.
    pub(crate) login: Option<SshLogin>,
}

/// SSH access to a job of the run.
pub(crate) struct SshLogin {
    pub(crate) at: ServerArgs,
    pub(crate) place: ssh::LoginTarget,
    pub(crate) identity: ssh::Identity,
}

impl SshLogin {
    /// Writes the entry for `ssh` and prints how to use it.
    async fn open(&self, cx: &Context, run: &Run, name: &str) -> Result<(), CliError> {
        let host = ssh::write_entry(cx, &self.at, run, name, self.place, &self.identity).await?;
        output::print_message(&format!("Log in: `ssh {host}`"));
        let of_place = run.jobs.iter().find(|job| {
            let spec = job.job_spec.value().unwrap_or_default();
            spec["replica_num"] == self.place.replica && spec["job_num"] == self.place.job
        });
        let connection =
            of_place.and_then(|job| job.job_connection_info.as_ref()?.value().ok()).unwrap_or_default();
        if let (Some(editor), Some(link)) =
            (connection["ide_name"].as_str(), connection["attached_ide_url"].as_str())
        {
            output::print_message(&output::printable(&format!("{editor}: {link}")));
        }
        Ok(())
    }
}

struct RunFollower<'a> {
    cx: &'a Context,
    name: String,
    tree: ProgressTree,
    log_mux: Option<LogMux<'a>>,
    since: Option<Timestamp>,
    /// Emits progress as JSON, instead of the tree.
    events: Option<EventWriter>,
    forwards: Option<PortForwards>,
    login: Option<SshLogin>,
    is_open: bool,
    pace: PollBackoff,
    seen: String,
    /// Last printed state of the deployment.
    rollout: Option<String>,
    request: InterruptListener,
    may_stop: bool,
}

pub(crate) async fn follow(cx: &Context, run: &Run, how: FollowOptions) -> Result<Exit, CliError> {
    let name = run_name(run);
    let as_events = matches!(how.output, Some(OutputMode::Events));
    let log_mux = how.output.map(LogMux::new);
    let mut following = RunFollower {
        cx,
        tree: ProgressTree::new(&name),
        name,
        log_mux,
        since: how.since,
        events: as_events.then(EventWriter::default),
        forwards: how.forwards,
        login: how.login,
        is_open: false,
        pace: PollBackoff::new(),
        seen: String::new(),
        rollout: if deployment_status::is_complete(run) {
            deployment_status::format_deployment(run)
        } else {
            None
        },
        request: InterruptListener::listen()?,
        may_stop: how.may_stop,
    };
    let request = ReadRequest { run_name: None, id: Some(run.id) };
    let mut run = run.clone();
    loop {
        following.update(&run).await?;
        let finished = is_finished(&run.status);
        if !following.switch_to(&run, finished).await? {
            // The reader closed stdout; the run continues.
            return Ok(Exit::Done);
        }
        if finished {
            return Ok(following.end(&run));
        }
        if let Some(exit) = following.wait(&run).await? {
            return Ok(exit);
        }
        run = cx.call_with_retry::<ReadRun>(&request).await?;
    }
}

impl RunFollower<'_> {
    /// Shows the changes of a run.
    async fn update(&mut self, run: &Run) -> Result<(), CliError> {
        let jobs = job_progress(run);
        let seen = format!(
            "{} {:?} {:?}",
            run.status_message,
            run.deployment,
            jobs.iter().map(JobProgress::milestone).collect::<Vec<_>>()
        );
        if seen != self.seen {
            self.seen = seen;
            self.pace.news();
        }
        if let Some(events) = &mut self.events {
            events.update(run);
        } else if !is_finished(&run.status) {
            self.print_deployment(run);
            self.draw(run, &jobs);
        }
        if let Some(forwards) = &mut self.forwards {
            forwards.switch_to(self.cx, &self.name, &jobs, self.events.is_some())?;
        }
        if !self.is_open
            && let Some(login) = &self.login
            && jobs.iter().any(|job| login.place.matches(job) && job.status == "running")
        {
            self.is_open = true;
            self.tree.erase();
            login.open(self.cx, run, &self.name).await?;
        }
        Ok(())
    }

    /// Prints each step of a deployment once, above the tree.
    fn print_deployment(&mut self, run: &Run) {
        let words = deployment_status::format_deployment(run);
        if words.is_none() || words == self.rollout {
            return;
        }
        self.tree.erase();
        if let Some(words) = &words {
            self.tree.line(words);
        }
        self.rollout = words;
    }

    fn draw(&mut self, run: &Run, jobs: &[JobProgress]) {
        // The tree cannot be drawn below an incomplete line of output.
        if self.log_mux.as_ref().is_some_and(|log_mux| log_mux.mid_line()) {
            return;
        }
        let status = if run.status_message.is_empty() { &run.status } else { &run.status_message };
        self.tree.show(status, jobs, progress::is_coming(run, jobs));
    }

    /// Returns false if stdout is closed.
    async fn switch_to(&mut self, run: &Run, finished: bool) -> Result<bool, CliError> {
        let Some(log_mux) = &mut self.log_mux else { return Ok(true) };
        if !log_mux.switch_to(self.cx, &self.name, run, self.since, &mut self.tree).await? {
            return Ok(false);
        }
        if finished { log_mux.finish(&mut self.tree).await } else { Ok(true) }
    }

    /// Writes output until the next poll of the run is due, or until the user makes a request. `Some` ends the command.
    async fn wait(&mut self, run: &Run) -> Result<Option<Exit>, CliError> {
        let due = Instant::now() + self.pace.wait();
        loop {
            let until = if self.tree.is_animated() { due.min(Instant::now() + FRAME_INTERVAL) } else { due };
            let event = async {
                match &mut self.log_mux {
                    Some(log_mux) => log_mux.pump(until, &mut self.tree).await,
                    None => {
                        tokio::time::sleep_until(until).await;
                        Ok(PumpEnd::DeadlineReached)
                    }
                }
            };
            let requested = tokio::select! {
                requested = self.request.next() => Some(requested),
                event = event => match event? {
                    PumpEnd::DeadlineReached => None,
                    PumpEnd::Over => {
                        self.pace.news();
                        return Ok(None);
                    }
                    PumpEnd::OutputClosed => return Ok(Some(Exit::Done)),
                },
            };
            if let Some(requested) = requested {
                return self.answer(requested).await;
            }
            if Instant::now() >= due {
                return Ok(None);
            }
            if self.events.is_none() {
                self.draw(run, &job_progress(run));
            }
        }
    }

    /// `Some` ends the command.
    async fn answer(&mut self, requested: UserRequest) -> Result<Option<Exit>, CliError> {
        self.tree.erase();
        let requested = match requested {
            UserRequest::Interrupt if !self.may_stop => UserRequest::Detach,
            UserRequest::Interrupt if output::can_prompt() => {
                let question = format!(
                    "`{}` has not ended. [s]top it, or [d]etach and leave it running? (Ctrl-C detaches)",
                    self.name
                );
                self.request.prompt(&question).await
            }
            UserRequest::Interrupt => UserRequest::Stop,
            UserRequest::Stop if !self.may_stop => UserRequest::Detach,
            other @ (UserRequest::Stop
            | UserRequest::Abort
            | UserRequest::Detach
            | UserRequest::StopWaiting) => other,
        };
        match requested {
            UserRequest::Stop | UserRequest::Interrupt => self.stop(false).await?,
            UserRequest::Abort => self.stop(true).await?,
            UserRequest::Detach => {
                if self.events.is_some() {
                    EventWriter::detached();
                } else {
                    let name = &self.name;
                    output::print_message(&format!(
                        "Detached from `{name}`, which is still running. Run `windlass attach --logs {name}` to follow it again."
                    ));
                }
                return Ok(Some(Exit::Done));
            }
            UserRequest::StopWaiting => {
                output::print_message(&format!(
                    "Stopped waiting. Run `windlass ps -a` to see the status of `{}`.",
                    self.name
                ));
                return Ok(Some(Exit::RunStopped));
            }
        }
        Ok(None)
    }

    async fn stop(&mut self, abort: bool) -> Result<(), CliError> {
        output::print_message(&format!("{} `{}`…", if abort { "Aborting" } else { "Stopping" }, self.name));
        let request = StopRequest { runs_names: vec![self.name.clone()], abort };
        // Safe to repeat: stopping a run is idempotent.
        self.cx.call_with_retry::<StopRuns>(&request).await?;
        self.request.set_stopping(abort);
        self.pace.news();
        Ok(())
    }

    fn end(&mut self, run: &Run) -> Exit {
        self.tree.erase();
        let exit = exit_summary::exit_for(run);
        if let Some(login) = &self.login {
            ssh::remove_entry(&self.name, login.place);
        }
        let reasons = &run.reasons;
        if self.events.is_some() {
            EventWriter::end(run, reasons, exit);
            return exit;
        }
        let style = Style::stderr();
        let status = if run.status_message.is_empty() { &run.status } else { &run.status_message };
        let start =
            if self.log_mux.as_ref().is_some_and(|log_mux| log_mux.mid_line()) && output::is_same_screen() {
                "\n"
            } else {
                ""
            };
        let mut text =
            format!("{start}{}: {}", self.name, style.paint(Colour::for_status(&run.status), status));
        if exit != Exit::Done {
            for why in reasons {
                // If the commands failed, the lines after the first repeat the end of the output, which is visible
                // right above.
                let shown = if matches!(exit, Exit::Job(_) | Exit::JobCodeTooHigh) && self.log_mux.is_some() {
                    why.lines().next().unwrap_or_default()
                } else {
                    why.trim_end()
                };
                text.push_str(&format!(
                    "\n  why:  {}",
                    exit_summary::indent_lines(&output::printable(shown))
                ));
            }
            if let Some(hint) = &run.hint {
                text.push_str(&format!("\n  hint: {hint}"));
            }
        }
        output::print_message(&text);
        exit
    }
}
