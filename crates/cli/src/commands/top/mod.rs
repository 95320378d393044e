//! `windlass top`: runs, queue, instances and events on one screen, with logs in place.
//!
//! `state` decides, `draw` renders. This module performs the effects: keys, requests and the screen. It polls for
//! events once a second, and for the lists only after new events, and at a longer interval.

mod draw;
mod logs;
mod rows;
mod state;

use std::{collections::VecDeque, io::IsTerminal as _, pin::Pin, thread, time::Duration};

use ratatui::{
    DefaultTerminal,
    crossterm::event::{self as input, Event as Input, KeyCode, KeyEventKind, KeyModifiers},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{Instant, sleep, sleep_until},
};
use windlass_api::{
    events::Event,
    instances::Instance,
    operations::{ListRuns, StopRuns},
    runs::{ListRequest, Run, StopRequest},
};

use self::{
    draw::Palette,
    logs::{LogFollower, LogUpdate},
    state::{Effect, Key, Row, TopState, View},
};
use super::{
    event::{EventFeed, fetch_newest, project_request},
    instance,
};
use crate::{
    cli::ServerArgs,
    context::{self, Context, run_name},
    error::CliError,
    exit::Exit,
    output::{format, style::Style},
};

/// Polling interval for events.
const EVENTS_INTERVAL: Duration = Duration::from_secs(1);
/// Polling interval for lists without new events.
const LISTS_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum time between two frames.
const DRAW_INTERVAL: Duration = Duration::from_millis(40);
const EVENTS_MAX: usize = 1000;
const ACTIVE_MAX: i64 = 100;
const FINISHED_MAX: i64 = 50;
const KEYS_MAX: usize = 64;

const EXAMPLES: &str = "\
Examples:
  windlass top                      runs, queue, instances and events; `?` lists the keys
  windlass top --project research   the same for another project

Keys: Enter opens, `l` shows logs, `d` describes and shows why, `s` stops after a confirmation, `/` filters, `:` selects
a view by name, `q` goes back.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) at: ServerArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return Err(CliError::usage("`windlass top` requires a terminal")
            .hint("use `windlass ps -o json` or `windlass event -o jsonl` in scripts"));
    }
    context::with_context(&args.at, async |cx| {
        // Report problems with the server or the project before the screen changes.
        let requested = project_request(cx).await?;
        let events = fetch_newest(cx, &requested, ACTIVE_MAX).await?;
        let feed = EventFeed::after(requested, &events);
        let mut screen = Screen::open()?;
        Top::new(cx, events).watch(feed, &mut screen.0).await
    })
}

/// The terminal, restored on drop.
struct Screen(DefaultTerminal);

impl Screen {
    fn open() -> Result<Self, CliError> {
        ratatui::try_init()
            .map(Self)
            .map_err(|error| CliError::from_error("failed to initialise the terminal", &error))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// A pending operation, kept between iterations so that a cancelled wait loses nothing.
type PendingWork<'a, T> = Option<Pin<Box<dyn Future<Output = T> + 'a>>>;

/// Never completes if the slot is empty.
async fn await_pending<T>(slot: &mut PendingWork<'_, T>) -> T {
    match slot {
        Some(work) => {
            let done = work.await;
            *slot = None;
            done
        }
        None => std::future::pending().await,
    }
}

/// Result of polling the server.
struct PollResult {
    feed: EventFeed,
    fresh: Result<ServerUpdate, CliError>,
}

struct ServerUpdate {
    events: Vec<Event>,
    /// Requested only after new events.
    lists: Option<(Vec<Run>, Vec<Instance>)>,
}

async fn poll_server(cx: &Context, mut feed: EventFeed, wait: Duration, lists: bool) -> PollResult {
    sleep(wait).await;
    let fresh = async {
        let events = feed.poll(cx).await?;
        let lists = if lists || !events.is_empty() {
            Some((fetch_runs(cx).await?, instance::list(cx, true, None).await?))
        } else {
            None
        };
        Ok(ServerUpdate { events, lists })
    }
    .await;
    PollResult { feed, fresh }
}

/// Returns the active runs, then the newest finished ones.
async fn fetch_runs(cx: &Context) -> Result<Vec<Run>, CliError> {
    let request = |only_active, limit| ListRequest {
        project_name: Some(cx.project.clone()),
        only_active,
        job_submissions_limit: Some(1),
        limit,
        ..ListRequest::default()
    };
    let mut all = cx.call::<ListRuns>(&request(true, ACTIVE_MAX)).await?;
    let recent = cx.call::<ListRuns>(&request(false, FINISHED_MAX)).await?;
    let fresh: Vec<Run> =
        recent.into_iter().filter(|run| !all.iter().any(|other| other.id == run.id)).collect();
    all.extend(fresh);
    Ok(all)
}

/// Result of an action started by a key.
enum ActionResult {
    Described { title: String, lines: Vec<String> },
    Stopped { run: String },
    Failed(CliError),
}

struct Top<'a> {
    cx: &'a Context,
    state: TopState,
    events: VecDeque<Event>,
    doing: PendingWork<'a, ActionResult>,
    log: PendingWork<'a, (LogFollower<'a>, LogUpdate)>,
}

impl<'a> Top<'a> {
    fn new(cx: &'a Context, events: Vec<Event>) -> Self {
        let state = TopState::new(format!("{} at {}", cx.project, cx.url));
        let mut top = Self { cx, state, events: events.into(), doing: None, log: None };
        top.state.update(View::Events, rows::event_rows(top.events.iter()));
        top
    }

    async fn watch(mut self, feed: EventFeed, terminal: &mut DefaultTerminal) -> Result<Exit, CliError> {
        let mut keys = spawn_key_reader();
        let failed =
            |error: &dyn std::error::Error| CliError::from_error("failed to listen for signals", error);
        let mut reported = signal(SignalKind::terminate()).map_err(|error| failed(&error))?;
        let mut left = signal(SignalKind::hangup()).map_err(|error| failed(&error))?;
        let cx = self.cx;
        let mut looking: PendingWork<'a, PollResult> =
            Some(Box::pin(poll_server(cx, feed, Duration::ZERO, true)));
        let mut lists_at = Instant::now() + LISTS_INTERVAL;
        let (mut draw_at, mut changed) = (Instant::now(), true);
        loop {
            if changed && Instant::now() >= draw_at {
                self.draw(terminal)?;
                (draw_at, changed) = (Instant::now() + DRAW_INTERVAL, false);
            }
            tokio::select! {
                input = keys.recv() => match input {
                    None => return Ok(Exit::Done),
                    Some(None) => {}
                    Some(Some(key)) => if self.press(key) { return Ok(Exit::Done) },
                },
                seen = await_pending(&mut looking) => {
                    let (feed, had_lists) = self.on_poll_result(seen);
                    if had_lists {
                        lists_at = Instant::now() + LISTS_INTERVAL;
                    }
                    let lists = Instant::now() + EVENTS_INTERVAL >= lists_at;
                    looking = Some(Box::pin(poll_server(cx, feed, EVENTS_INTERVAL, lists)));
                }
                done = await_pending(&mut self.doing) => self.on_action_result(done),
                (follower, received) = await_pending(&mut self.log) => self.received(follower, received),
                () = sleep_until(draw_at), if changed => continue,
                _ = reported.recv() => return Ok(Exit::Done),
                _ = left.recv() => return Ok(Exit::Done),
            }
            changed = true;
        }
    }

    fn draw(&mut self, terminal: &mut DefaultTerminal) -> Result<(), CliError> {
        let paint = Palette { colours: Style::stdout().is_enabled() };
        let state = &mut self.state;
        let drawn = terminal.draw(|frame| {
            state.page = draw::page_size(frame.area().height);
            draw::draw_screen(frame, state, paint);
        });
        drawn.map(drop).map_err(|error| CliError::from_error("failed to draw on the terminal", &error))
    }

    /// Returns whether to quit.
    fn press(&mut self, key: Key) -> bool {
        let cx = self.cx;
        match self.state.press(key) {
            None => {}
            Some(Effect::Quit) => return true,
            Some(Effect::Unfollow) => self.log = None,
            Some(Effect::Follow { run }) => {
                self.log = Some(Box::pin(LogFollower::new(cx, run).next_update()));
            }
            Some(Effect::Describe { view, row }) => {
                self.log = None;
                self.describe(view, row);
            }
            Some(Effect::Stop { run, abort }) => self.doing = Some(Box::pin(stop_run(cx, run, abort))),
        }
        false
    }

    /// Describes a row. Events are complete already; other details are requested.
    fn describe(&mut self, view: View, row: Row) {
        let cx = self.cx;
        match view {
            View::Events => {
                let found = self.events.iter().find(|event| event.id.to_string() == row.key);
                let lines = found.map(rows::describe_event).unwrap_or_default();
                self.state.describe("event".to_owned(), lines);
            }
            View::Runs | View::Queue => {
                self.doing = Some(Box::pin(async move {
                    match cx.run(&row.key).await {
                        Ok(run) => ActionResult::Described {
                            title: format!("run {}", run_name(&run)),
                            lines: rows::describe_run(&run, format::now()),
                        },
                        Err(problem) => ActionResult::Failed(problem),
                    }
                }));
            }
            View::Instances => {
                self.doing = Some(Box::pin(async move {
                    match instance::find(cx, &row.key).await {
                        Ok(one) => ActionResult::Described {
                            title: format!("instance {}", one.name),
                            lines: rows::describe_instance(&one),
                        },
                        Err(problem) => ActionResult::Failed(problem),
                    }
                }));
            }
        }
    }

    fn on_action_result(&mut self, done: ActionResult) {
        match done {
            ActionResult::Described { title, lines } => self.state.describe(title, lines),
            ActionResult::Stopped { run } => self.state.message = format!("`{run}` is stopping"),
            ActionResult::Failed(problem) => self.state.message = one_line(&problem),
        }
    }

    fn received(&mut self, follower: LogFollower<'a>, received: LogUpdate) {
        match received {
            LogUpdate::Text(text) => self.state.append_log(&text),
            LogUpdate::Nothing => {}
            LogUpdate::Ended(why) => {
                self.state.message = why;
                return;
            }
            LogUpdate::Failed(problem) => {
                self.state.message = one_line(&problem);
                return;
            }
        }
        self.log = Some(Box::pin(follower.next_update()));
    }

    /// Returns the feed for the next poll, and whether the lists were updated.
    fn on_poll_result(&mut self, PollResult { feed, fresh }: PollResult) -> (EventFeed, bool) {
        let fresh = match fresh {
            Ok(fresh) => fresh,
            Err(problem) => {
                self.state.failure = one_line(&problem);
                return (feed, false);
            }
        };
        self.state.failure.clear();
        if !fresh.events.is_empty() {
            self.events.extend(fresh.events);
            while self.events.len() > EVENTS_MAX {
                self.events.pop_front();
            }
            self.state.update(View::Events, rows::event_rows(self.events.iter()));
        }
        let Some((runs, instances)) = fresh.lists else { return (feed, false) };
        let now = format::now();
        self.state.update(View::Runs, rows::run_rows(&runs, now));
        self.state.update(View::Queue, rows::queue_rows(&runs, now));
        self.state.update(View::Instances, rows::instance_rows(&instances));
        (feed, true)
    }
}

fn one_line(problem: &CliError) -> String {
    problem.text().replace('\n', " ")
}

async fn stop_run(cx: &Context, run: String, abort: bool) -> ActionResult {
    match cx.call::<StopRuns>(&StopRequest { runs_names: vec![run.clone()], abort }).await {
        Ok(()) => ActionResult::Stopped { run },
        Err(problem) => ActionResult::Failed(problem),
    }
}

/// Reads keys on a separate thread, so that the wait blocks no other work. `None` is a resize. The thread ends with the
/// program: it is blocked in a read that cannot be interrupted.
fn spawn_key_reader() -> mpsc::Receiver<Option<Key>> {
    let (sender, receiver) = mpsc::channel(KEYS_MAX);
    thread::spawn(move || {
        while let Ok(read) = input::read() {
            let news = match read {
                Input::Key(key) if key.kind == KeyEventKind::Release => continue,
                Input::Key(key) => match map_key(key.code, key.modifiers) {
                    Some(key) => Some(key),
                    None => continue,
                },
                Input::Resize(..) => None,
                Input::FocusGained | Input::FocusLost | Input::Mouse(_) | Input::Paste(_) => continue,
            };
            if sender.blocking_send(news).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Maps a key, or returns `None` if it has no function.
#[expect(clippy::wildcard_enum_match_arm, reason = "most keys of a keyboard mean nothing here")]
fn map_key(code: KeyCode, modifiers: KeyModifiers) -> Option<Key> {
    if modifiers.contains(KeyModifiers::CONTROL) {
        return match code {
            KeyCode::Char('c') => Some(Key::Interrupt),
            KeyCode::Char('f') => Some(Key::PageDown),
            KeyCode::Char('b') => Some(Key::PageUp),
            _ => None,
        };
    }
    Some(match code {
        KeyCode::Char(letter) => Key::Char(letter),
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Esc,
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Tab => Key::Tab,
        KeyCode::BackTab => Key::BackTab,
        _ => return None,
    })
}
