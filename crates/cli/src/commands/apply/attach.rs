//! Staying with a run: its status on stderr, its output on stdout to the byte, its exit code at the end.

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task::JoinHandle,
    time::{Instant, sleep_until},
};
use windlass_api::{
    operations::{ReadRun, StopRuns},
    runs::{JobSubmission, ReadRequest, Run, StopRequest},
};

use super::{
    outcome,
    tail::{Copied, Pace, Tail},
};
use crate::{
    commands::is_finished,
    context::{Context, name_of},
    exit::Exit,
    output::{
        self,
        style::{Colour, Style},
    },
    problem::Problem,
};

/// What interrupts have asked for so far.
enum Wish {
    None,
    /// A question is on the screen.
    Asking(JoinHandle<bool>),
    Stopping,
    Aborting,
}

struct Attached<'a> {
    cx: &'a Context,
    name: String,
    said: String,
    tail: Option<Tail<'a>>,
    pace: Pace,
    wish: Wish,
}

pub(super) async fn follow(cx: &Context, run: &Run) -> Result<Exit, Problem> {
    let failed = |error: std::io::Error| Problem::caused("listen for signals", &error);
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut attached = Attached {
        cx,
        name: name_of(run),
        said: String::new(),
        tail: None,
        pace: Pace::new(),
        wish: Wish::None,
    };
    let request = ReadRequest { run_name: None, id: Some(run.id) };
    let mut run = run.clone();
    loop {
        attached.tell(&run);
        let finished = is_finished(&run.status);
        if !attached.turn_to(&run, finished).await? {
            // Nobody reads our output any more; the run does not depend on that.
            return Ok(Exit::Done);
        }
        if finished {
            return Ok(attached.end(&run));
        }
        if let Some(exit) = attached.wait(&mut interrupt, &mut terminate).await? {
            return Ok(exit);
        }
        run = cx.patiently::<ReadRun>(&request).await?;
    }
}

impl Attached<'_> {
    /// Each change of status once.
    fn tell(&mut self, run: &Run) {
        let status = if run.status_message.is_empty() { &run.status } else { &run.status_message };
        if *status == self.said {
            return;
        }
        self.said.clone_from(status);
        self.pace.news();
        // How it ended is said at the end, with the reason.
        if !is_finished(&run.status) {
            let style = Style::stderr();
            let status = style.paint(Colour::of_status(status), &output::printable(status));
            output::say(&format!("{}: {status}", self.name));
        }
    }

    /// The newest submission is the one to follow, after all of the one before. False when nobody reads it.
    async fn turn_to(&mut self, run: &Run, finished: bool) -> Result<bool, Problem> {
        if let Some(latest) = first_job(run)
            && self.tail.as_ref().is_none_or(|tail| tail.submission() != latest.id)
        {
            if !self.finish().await? {
                return Ok(false);
            }
            self.tail = Some(Tail::new(self.cx, &self.name, latest.id, None, false));
        }
        if finished { self.finish().await } else { Ok(true) }
    }

    async fn finish(&mut self) -> Result<bool, Problem> {
        match &mut self.tail {
            Some(tail) => tail.finish().await,
            None => Ok(true),
        }
    }

    /// Copies what the job writes until it is time to look at the run, or until the user wants something. `Some` ends
    /// the command.
    async fn wait(
        &mut self,
        interrupt: &mut Signal,
        terminate: &mut Signal,
    ) -> Result<Option<Exit>, Problem> {
        let due = Instant::now() + self.pace.wait();
        let copied = async {
            match &mut self.tail {
                Some(tail) => tail.copy(due).await,
                None => {
                    sleep_until(due).await;
                    Ok(Copied::Due)
                }
            }
        };
        let answer = async {
            match &mut self.wish {
                Wish::Asking(asked) => asked.await.unwrap_or(false),
                Wish::None | Wish::Stopping | Wish::Aborting => std::future::pending().await,
            }
        };
        tokio::select! {
            copied = copied => Ok(match copied? {
                Copied::Due => None,
                Copied::Over => {
                    self.pace.news();
                    None
                }
                Copied::Unread => Some(Exit::Done),
            }),
            yes = answer => self.answered(yes).await,
            _ = interrupt.recv() => self.interrupted(output::can_ask()).await,
            _ = terminate.recv() => self.interrupted(false).await,
        }
    }

    async fn answered(&mut self, yes: bool) -> Result<Option<Exit>, Problem> {
        if yes {
            self.stop(false).await?;
            return Ok(None);
        }
        output::say(&format!("Left `{0}` running; `windlass logs -f {0}` follows it again.", self.name));
        Ok(Some(Exit::Done))
    }

    /// The first asks, or stops where nobody can be asked. The second aborts, the third leaves.
    async fn interrupted(&mut self, can_ask: bool) -> Result<Option<Exit>, Problem> {
        match &self.wish {
            Wish::None if can_ask => {
                let question =
                    format!("\nStop `{}`? (no leaves it running; Ctrl-C again aborts it)", self.name);
                self.wish = Wish::Asking(tokio::task::spawn_blocking(move || output::ask(&question)));
            }
            Wish::None => self.stop(false).await?,
            Wish::Asking(_) | Wish::Stopping => self.stop(true).await?,
            Wish::Aborting => {
                output::say(&format!("Left; `windlass ps -a` shows what became of `{}`.", self.name));
                return Ok(Some(Exit::RunStopped));
            }
        }
        Ok(None)
    }

    async fn stop(&mut self, abort: bool) -> Result<(), Problem> {
        output::say(&format!("{} `{}`…", if abort { "\nAborting" } else { "Stopping" }, self.name));
        let request = StopRequest { runs_names: vec![self.name.clone()], abort };
        self.cx.call::<StopRuns>(&request).await?;
        self.wish = if abort { Wish::Aborting } else { Wish::Stopping };
        Ok(())
    }

    fn end(&self, run: &Run) -> Exit {
        let exit = outcome::exit(run);
        let style = Style::stderr();
        let status = if run.status_message.is_empty() { &run.status } else { &run.status_message };
        let mut text = format!("{}: {}", self.name, style.paint(Colour::of_status(&run.status), status));
        if exit != Exit::Done {
            for why in outcome::reasons(run) {
                // Below the first line are the last lines of the output, if it was the commands that failed; they
                // stand right above.
                let shown = if matches!(exit, Exit::Job(_) | Exit::JobAbove) {
                    why.lines().next().unwrap_or_default()
                } else {
                    why.trim_end()
                };
                text.push_str(&format!("\n  why:  {}", outcome::indented(&output::printable(shown))));
            }
            if let Some(hint) = outcome::hint(run, &self.name) {
                text.push_str(&format!("\n  hint: {hint}"));
            }
        }
        output::say(&text);
        exit
    }
}

/// The newest submission of the first job: whose output is shown.
fn first_job(run: &Run) -> Option<&JobSubmission> {
    run.jobs.first().and_then(|job| job.job_submissions.last())
}
