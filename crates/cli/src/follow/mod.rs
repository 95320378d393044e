//! Staying with a run: how it comes to run, what its jobs write, its ports, and its exit code at the end.
//!
//! Progress goes to stderr, output to stdout. A server that restarts is waited for, and every log is taken up again at
//! the byte where it was.

mod chorus;
mod events;
mod forward;
mod outcome;
mod progress;
pub(crate) mod rollout;
pub(crate) mod ssh;
mod tail;
mod tree;
mod voices;
mod wish;

use std::time::Duration;

use tokio::time::Instant;
use windlass_api::{
    operations::{ReadRun, StopRuns},
    runs::{ReadRequest, Run, StopRequest},
};
use windlass_model::time::Timestamp;

use self::wish::{Asked, Wish};
pub(crate) use self::{
    chorus::{Chorus, Manner, Sung},
    events::Events,
    forward::{Forwards, Wanted as Ports},
    outcome::{hint, indented, reasons},
    progress::{Standing, standings},
    tail::{Pace, Pages, Part, Piece, Tail, last_lines},
    tree::Tree,
    voices::Voices,
};
use crate::{
    cli::At,
    commands::is_finished,
    context::{Context, name_of},
    exit::Exit,
    output::{
        self,
        style::{Colour, Style},
    },
    problem::Problem,
};

/// How often a tree moves.
const FRAME: Duration = Duration::from_millis(100);

/// What is wanted of a run that is followed.
pub(crate) struct How {
    /// How its output is written; `None` is not at all.
    pub(crate) output: Option<Manner>,
    pub(crate) since: Option<Timestamp>,
    pub(crate) forwards: Option<Forwards>,
    /// Whether an interrupt may stop the run. If not, it only ends the following.
    pub(crate) may_stop: bool,
    /// How people log in, where that is wanted.
    pub(crate) login: Option<Login>,
}

/// How people log in to a job of the run.
pub(crate) struct Login {
    pub(crate) at: At,
    pub(crate) place: ssh::Place,
    pub(crate) identity: ssh::Identity,
}

impl Login {
    /// Writes the entry for `ssh`, and says how to use it.
    async fn open(&self, cx: &Context, run: &Run, name: &str) -> Result<(), Problem> {
        let host = ssh::write(cx, &self.at, run, name, self.place, &self.identity).await?;
        output::say(&format!("Log in: `ssh {host}`"));
        let of_place = run.jobs.iter().find(|job| {
            let spec = job.job_spec.value().unwrap_or_default();
            spec["replica_num"] == self.place.replica && spec["job_num"] == self.place.job
        });
        let way = of_place.and_then(|job| job.job_connection_info.as_ref()?.value().ok()).unwrap_or_default();
        if let (Some(editor), Some(link)) = (way["ide_name"].as_str(), way["attached_ide_url"].as_str()) {
            output::say(&output::printable(&format!("{editor}: {link}")));
        }
        Ok(())
    }
}

struct Following<'a> {
    cx: &'a Context,
    name: String,
    tree: Tree,
    chorus: Option<Chorus<'a>>,
    since: Option<Timestamp>,
    /// Where progress goes, when machines read it.
    events: Option<Events>,
    forwards: Option<Forwards>,
    login: Option<Login>,
    is_open: bool,
    pace: Pace,
    seen: String,
    /// What was said last of the deployment.
    rollout: Option<String>,
    wish: Wish,
    may_stop: bool,
}

pub(crate) async fn follow(cx: &Context, run: &Run, how: How) -> Result<Exit, Problem> {
    let name = name_of(run);
    let as_events = matches!(how.output, Some(Manner::Events));
    let chorus = how.output.map(Chorus::new);
    let mut following = Following {
        cx,
        tree: Tree::new(&name),
        name,
        chorus,
        since: how.since,
        events: as_events.then(Events::default),
        forwards: how.forwards,
        login: how.login,
        is_open: false,
        pace: Pace::new(),
        seen: String::new(),
        rollout: if rollout::is_over(run) { rollout::words(run) } else { None },
        wish: Wish::listen()?,
        may_stop: how.may_stop,
    };
    let request = ReadRequest { run_name: None, id: Some(run.id) };
    let mut run = run.clone();
    loop {
        following.look(&run).await?;
        let finished = is_finished(&run.status);
        if !following.turn_to(&run, finished).await? {
            // Nobody reads our output any more; the run does not depend on that.
            return Ok(Exit::Done);
        }
        if finished {
            return Ok(following.end(&run));
        }
        if let Some(exit) = following.wait(&run).await? {
            return Ok(exit);
        }
        run = cx.patiently::<ReadRun>(&request).await?;
    }
}

impl Following<'_> {
    /// Shows what changed.
    async fn look(&mut self, run: &Run) -> Result<(), Problem> {
        let jobs = standings(run);
        let seen = format!(
            "{} {:?} {:?}",
            run.status_message,
            run.deployment,
            jobs.iter().map(Standing::milestone).collect::<Vec<_>>()
        );
        if seen != self.seen {
            self.seen = seen;
            self.pace.news();
        }
        if let Some(events) = &mut self.events {
            events.look(run);
        } else if !is_finished(&run.status) {
            self.tell_rollout(run);
            self.draw(run, &jobs);
        }
        if let Some(forwards) = &mut self.forwards {
            forwards.turn_to(self.cx, &self.name, &jobs, self.events.is_some())?;
        }
        if !self.is_open
            && let Some(login) = &self.login
            && jobs.iter().any(|job| login.place.is(job) && job.status == "running")
        {
            self.is_open = true;
            self.tree.erase();
            login.open(self.cx, run, &self.name).await?;
        }
        Ok(())
    }

    /// Each step of a deployment once; it stays above the tree.
    fn tell_rollout(&mut self, run: &Run) {
        let words = rollout::words(run);
        if words.is_none() || words == self.rollout {
            return;
        }
        self.tree.erase();
        if let Some(words) = &words {
            self.tree.line(words);
        }
        self.rollout = words;
    }

    fn draw(&mut self, run: &Run, jobs: &[Standing]) {
        // Below half a line of output there is no place for a tree.
        if self.chorus.as_ref().is_some_and(|chorus| chorus.mid_line()) {
            return;
        }
        let status = if run.status_message.is_empty() { &run.status } else { &run.status_message };
        self.tree.show(status, jobs, progress::is_coming(run, jobs));
    }

    /// False when nobody reads the output.
    async fn turn_to(&mut self, run: &Run, finished: bool) -> Result<bool, Problem> {
        let Some(chorus) = &mut self.chorus else { return Ok(true) };
        if !chorus.turn_to(self.cx, &self.name, run, self.since, &mut self.tree).await? {
            return Ok(false);
        }
        if finished { chorus.finish(&mut self.tree).await } else { Ok(true) }
    }

    /// Copies what the jobs write until it is time to look at the run, or until the user wants something. `Some` ends
    /// the command.
    async fn wait(&mut self, run: &Run) -> Result<Option<Exit>, Problem> {
        let due = Instant::now() + self.pace.wait();
        loop {
            let until = if self.tree.moves() { due.min(Instant::now() + FRAME) } else { due };
            let sung = async {
                match &mut self.chorus {
                    Some(chorus) => chorus.sing(until, &mut self.tree).await,
                    None => {
                        tokio::time::sleep_until(until).await;
                        Ok(Sung::Due)
                    }
                }
            };
            let asked = tokio::select! {
                asked = self.wish.next() => Some(asked),
                sung = sung => match sung? {
                    Sung::Due => None,
                    Sung::Over => {
                        self.pace.news();
                        return Ok(None);
                    }
                    Sung::Unread => return Ok(Some(Exit::Done)),
                },
            };
            if let Some(asked) = asked {
                return self.answer(asked).await;
            }
            if Instant::now() >= due {
                return Ok(None);
            }
            if self.events.is_none() {
                self.draw(run, &standings(run));
            }
        }
    }

    /// `Some` ends the command.
    async fn answer(&mut self, asked: Asked) -> Result<Option<Exit>, Problem> {
        self.tree.erase();
        let asked = match asked {
            Asked::Interrupt if !self.may_stop => Asked::Detach,
            Asked::Interrupt if output::can_ask() => {
                let question = format!(
                    "`{}` is not over. [s]top it, or [d]etach and leave it running? (Ctrl-C detaches)",
                    self.name
                );
                self.wish.ask(&question).await
            }
            Asked::Interrupt => Asked::Stop,
            Asked::Stop if !self.may_stop => Asked::Detach,
            other @ (Asked::Stop | Asked::Abort | Asked::Detach | Asked::Leave) => other,
        };
        match asked {
            Asked::Stop | Asked::Interrupt => self.stop(false).await?,
            Asked::Abort => self.stop(true).await?,
            Asked::Detach => {
                if self.events.is_some() {
                    Events::detached();
                } else {
                    let name = &self.name;
                    output::say(&format!(
                        "Left `{name}` running; `windlass attach --logs {name}` follows it again."
                    ));
                }
                return Ok(Some(Exit::Done));
            }
            Asked::Leave => {
                output::say(&format!("Left; `windlass ps -a` shows what became of `{}`.", self.name));
                return Ok(Some(Exit::RunStopped));
            }
        }
        Ok(None)
    }

    async fn stop(&mut self, abort: bool) -> Result<(), Problem> {
        output::say(&format!("{} `{}`…", if abort { "Aborting" } else { "Stopping" }, self.name));
        let request = StopRequest { runs_names: vec![self.name.clone()], abort };
        // It may be asked again: what stops already stops.
        self.cx.patiently::<StopRuns>(&request).await?;
        self.wish.stopping(abort);
        self.pace.news();
        Ok(())
    }

    fn end(&mut self, run: &Run) -> Exit {
        self.tree.erase();
        let exit = outcome::exit(run);
        if let Some(login) = &self.login {
            ssh::remove(&self.name, login.place);
        }
        let reasons = outcome::reasons(run);
        if self.events.is_some() {
            Events::end(run, &reasons, exit);
            return exit;
        }
        let style = Style::stderr();
        let status = if run.status_message.is_empty() { &run.status } else { &run.status_message };
        let start = if self.chorus.as_ref().is_some_and(|chorus| chorus.mid_line()) && output::is_one_screen()
        {
            "\n"
        } else {
            ""
        };
        let mut text =
            format!("{start}{}: {}", self.name, style.paint(Colour::of_status(&run.status), status));
        if exit != Exit::Done {
            for why in reasons {
                // Below the first line are the last lines of the output, if it was the commands that failed; they
                // stand right above.
                let shown = if matches!(exit, Exit::Job(_) | Exit::JobAbove) && self.chorus.is_some() {
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
