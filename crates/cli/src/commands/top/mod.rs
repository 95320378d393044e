//! `windlass top`: runs, queue, instances and events on one screen, with logs in place.
//!
//! `state` is the brain, `draw` the picture. Here are the hands: keys, questions to the server, the screen. The server
//! is asked for events once a second; lists only when something happened, and now and then.

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
    draw::Paint,
    logs::{Follower, Heard},
    state::{Key, Order, Row, State, View},
};
use super::{
    event::{Feed, newest, of_project},
    instance,
};
use crate::{
    cli::At,
    context::{self, Context, name_of},
    exit::Exit,
    output::{style::Style, words},
    problem::Problem,
};

/// Between two questions for events.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Lists are asked for this often even if nothing seems to have happened.
const LISTS_EVERY: Duration = Duration::from_secs(10);
/// The picture changes no faster.
const DRAW_EVERY: Duration = Duration::from_millis(40);
const EVENTS_KEPT: usize = 1000;
const ACTIVE_MAX: i64 = 100;
const FINISHED_MAX: i64 = 50;
const KEYS_MAX: usize = 64;

const EXAMPLES: &str = "\
Examples:
  windlass top                      runs, queue, instances and events; `?` lists the keys
  windlass top --project research   of another project

Keys: Enter opens, `l` logs, `d` describes and says why, `s` stops after a question, `/` filters, `:` goes to a view by
its name, `q` goes back.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) at: At,
}

pub(crate) fn run(args: &Args) -> Result<Exit, Problem> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return Err(Problem::misuse("`top` needs a terminal")
            .hint("`windlass ps -o json` and `windlass event -o jsonl` are for scripts"));
    }
    context::with(&args.at, async |cx| {
        // Whatever is wrong with the server or the project is said before the screen changes.
        let asked = of_project(cx).await?;
        let events = newest(cx, &asked, ACTIVE_MAX).await?;
        let feed = Feed::after(asked, &events);
        let mut screen = Screen::open()?;
        Top::new(cx, events).watch(feed, &mut screen.0).await
    })
}

/// The terminal, put back when it is dropped.
struct Screen(DefaultTerminal);

impl Screen {
    fn open() -> Result<Self, Problem> {
        ratatui::try_init().map(Self).map_err(|error| Problem::caused("take over the terminal", &error))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Something under way, kept between turns so that giving up a wait loses nothing.
type Slot<'a, T> = Option<Pin<Box<dyn Future<Output = T> + 'a>>>;

/// Never done when there is nothing.
async fn arrived<T>(slot: &mut Slot<'_, T>) -> T {
    match slot {
        Some(work) => {
            let done = work.await;
            *slot = None;
            done
        }
        None => std::future::pending().await,
    }
}

/// What a look at the server came to.
struct Seen {
    feed: Feed,
    fresh: Result<Fresh, Problem>,
}

struct Fresh {
    events: Vec<Event>,
    /// Asked for only when something happened.
    lists: Option<(Vec<Run>, Vec<Instance>)>,
}

async fn look(cx: &Context, mut feed: Feed, wait: Duration, lists: bool) -> Seen {
    sleep(wait).await;
    let fresh = async {
        let events = feed.look(cx).await?;
        let lists = if lists || !events.is_empty() {
            Some((runs(cx).await?, instance::list(cx, true, None).await?))
        } else {
            None
        };
        Ok(Fresh { events, lists })
    }
    .await;
    Seen { feed, fresh }
}

/// Those that are active, then the newest that are not.
async fn runs(cx: &Context) -> Result<Vec<Run>, Problem> {
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

/// What was asked for by a key.
enum Done {
    Described { title: String, lines: Vec<String> },
    Stopped { run: String },
    Failed(Problem),
}

struct Top<'a> {
    cx: &'a Context,
    state: State,
    events: VecDeque<Event>,
    doing: Slot<'a, Done>,
    log: Slot<'a, (Follower<'a>, Heard)>,
}

impl<'a> Top<'a> {
    fn new(cx: &'a Context, events: Vec<Event>) -> Self {
        let state = State::new(format!("{} at {}", cx.project, cx.url));
        let mut top = Self { cx, state, events: events.into(), doing: None, log: None };
        top.state.update(View::Events, rows::events(top.events.iter()));
        top
    }

    async fn watch(mut self, feed: Feed, terminal: &mut DefaultTerminal) -> Result<Exit, Problem> {
        let mut keys = keys();
        let failed = |error: &dyn std::error::Error| Problem::caused("watch for signals", error);
        let mut told = signal(SignalKind::terminate()).map_err(|error| failed(&error))?;
        let mut left = signal(SignalKind::hangup()).map_err(|error| failed(&error))?;
        let cx = self.cx;
        let mut looking: Slot<'a, Seen> = Some(Box::pin(look(cx, feed, Duration::ZERO, true)));
        let mut lists_at = Instant::now() + LISTS_EVERY;
        let (mut draw_at, mut changed) = (Instant::now(), true);
        loop {
            if changed && Instant::now() >= draw_at {
                self.draw(terminal)?;
                (draw_at, changed) = (Instant::now() + DRAW_EVERY, false);
            }
            tokio::select! {
                input = keys.recv() => match input {
                    None => return Ok(Exit::Done),
                    Some(None) => {}
                    Some(Some(key)) => if self.press(key) { return Ok(Exit::Done) },
                },
                seen = arrived(&mut looking) => {
                    let (feed, had_lists) = self.saw(seen);
                    if had_lists {
                        lists_at = Instant::now() + LISTS_EVERY;
                    }
                    let lists = Instant::now() + LOOK_EVERY >= lists_at;
                    looking = Some(Box::pin(look(cx, feed, LOOK_EVERY, lists)));
                }
                done = arrived(&mut self.doing) => self.did(done),
                (follower, heard) = arrived(&mut self.log) => self.heard(follower, heard),
                () = sleep_until(draw_at), if changed => continue,
                _ = told.recv() => return Ok(Exit::Done),
                _ = left.recv() => return Ok(Exit::Done),
            }
            changed = true;
        }
    }

    fn draw(&mut self, terminal: &mut DefaultTerminal) -> Result<(), Problem> {
        let paint = Paint { colours: Style::stdout().is_on() };
        let state = &mut self.state;
        let drawn = terminal.draw(|frame| {
            state.page = draw::page(frame.area().height);
            draw::screen(frame, state, paint);
        });
        drawn.map(drop).map_err(|error| Problem::caused("draw on the terminal", &error))
    }

    /// True when it is over.
    fn press(&mut self, key: Key) -> bool {
        let cx = self.cx;
        match self.state.press(key) {
            None => {}
            Some(Order::Quit) => return true,
            Some(Order::Unfollow) => self.log = None,
            Some(Order::Follow { run }) => {
                self.log = Some(Box::pin(Follower::new(cx, run).turn()));
            }
            Some(Order::Describe { view, row }) => {
                self.log = None;
                self.describe(view, row);
            }
            Some(Order::Stop { run, abort }) => self.doing = Some(Box::pin(stop(cx, run, abort))),
        }
        false
    }

    /// What an event says is here already; the rest is asked for.
    fn describe(&mut self, view: View, row: Row) {
        let cx = self.cx;
        match view {
            View::Events => {
                let found = self.events.iter().find(|event| event.id.to_string() == row.key);
                let lines = found.map(rows::about_event).unwrap_or_default();
                self.state.describe("event".to_owned(), lines);
            }
            View::Runs | View::Queue => {
                self.doing = Some(Box::pin(async move {
                    match cx.run(&row.key).await {
                        Ok(run) => Done::Described {
                            title: format!("run {}", name_of(&run)),
                            lines: rows::about_run(&run, words::now()),
                        },
                        Err(problem) => Done::Failed(problem),
                    }
                }));
            }
            View::Instances => {
                self.doing = Some(Box::pin(async move {
                    match instance::find(cx, &row.key).await {
                        Ok(one) => Done::Described {
                            title: format!("instance {}", one.name),
                            lines: rows::about_instance(&one),
                        },
                        Err(problem) => Done::Failed(problem),
                    }
                }));
            }
        }
    }

    fn did(&mut self, done: Done) {
        match done {
            Done::Described { title, lines } => self.state.describe(title, lines),
            Done::Stopped { run } => self.state.message = format!("`{run}` was told to stop"),
            Done::Failed(problem) => self.state.message = one_line(&problem),
        }
    }

    fn heard(&mut self, follower: Follower<'a>, heard: Heard) {
        match heard {
            Heard::Text(text) => self.state.wrote(&text),
            Heard::Nothing => {}
            Heard::Over(why) => {
                self.state.message = why;
                return;
            }
            Heard::Failed(problem) => {
                self.state.message = one_line(&problem);
                return;
            }
        }
        self.log = Some(Box::pin(follower.turn()));
    }

    /// The feed, for the next look, and whether the lists were fresh.
    fn saw(&mut self, Seen { feed, fresh }: Seen) -> (Feed, bool) {
        let fresh = match fresh {
            Ok(fresh) => fresh,
            Err(problem) => {
                self.state.trouble = one_line(&problem);
                return (feed, false);
            }
        };
        self.state.trouble.clear();
        if !fresh.events.is_empty() {
            self.events.extend(fresh.events);
            while self.events.len() > EVENTS_KEPT {
                self.events.pop_front();
            }
            self.state.update(View::Events, rows::events(self.events.iter()));
        }
        let Some((runs, instances)) = fresh.lists else { return (feed, false) };
        let now = words::now();
        self.state.update(View::Runs, rows::runs(&runs, now));
        self.state.update(View::Queue, rows::queue(&runs, now));
        self.state.update(View::Instances, rows::instances(&instances));
        (feed, true)
    }
}

fn one_line(problem: &Problem) -> String {
    problem.text().replace('\n', " ")
}

async fn stop(cx: &Context, run: String, abort: bool) -> Done {
    match cx.call::<StopRuns>(&StopRequest { runs_names: vec![run.clone()], abort }).await {
        Ok(()) => Done::Stopped { run },
        Err(problem) => Done::Failed(problem),
    }
}

/// Keys, read where waiting for them blocks nobody. `None` is a terminal of another size. The thread ends with the
/// program: it waits in a read that nothing else can end.
fn keys() -> mpsc::Receiver<Option<Key>> {
    let (sender, receiver) = mpsc::channel(KEYS_MAX);
    thread::spawn(move || {
        while let Ok(read) = input::read() {
            let news = match read {
                Input::Key(key) if key.kind == KeyEventKind::Release => continue,
                Input::Key(key) => match known(key.code, key.modifiers) {
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

/// The key, if it means anything here.
#[expect(clippy::wildcard_enum_match_arm, reason = "most keys of a keyboard mean nothing here")]
fn known(code: KeyCode, modifiers: KeyModifiers) -> Option<Key> {
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
