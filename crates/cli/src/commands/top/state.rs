//! State of `top`: what is shown, and the effect of each key. Independent of terminal, server and clock.

use std::collections::VecDeque;

/// Maximum number of log lines in memory; `windlass logs` shows older ones.
const LOG_LINES_MAX: usize = 5000;
/// Maximum length of a line; longer ones are truncated.
const LINE_BYTES_MAX: usize = 4000;
/// Maximum length of input after `:` and `/`.
const INPUT_CHARS_MAX: usize = 80;

/// A key with a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Enter,
    Esc,
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Backspace,
    Tab,
    BackTab,
    /// Ctrl-C.
    Interrupt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Runs,
    Queue,
    Instances,
    Events,
}

impl View {
    pub(super) const ALL: [Self; 4] = [Self::Runs, Self::Queue, Self::Instances, Self::Events];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Runs => "runs",
            Self::Queue => "queue",
            Self::Instances => "instances",
            Self::Events => "events",
        }
    }

    pub(super) const fn head(self) -> &'static [&'static str] {
        match self {
            Self::Runs => {
                &["NAME", "STATUS", "TYPE", "USER", "FLEET", "GPU", "PRICE", "SUBMITTED", "MESSAGE"]
            }
            Self::Queue => &["NAME", "STATUS", "PRIORITY", "WAITS", "USER", "WANTS", "MESSAGE"],
            Self::Instances => &["NAME", "STATUS", "FLEET", "BACKEND", "RESOURCES", "PRICE", "JOB"],
            Self::Events => &["TIME", "ABOUT", "BY", "MESSAGE"],
        }
    }

    /// Columns that are left out on a narrow screen, the least important one first.
    pub(super) const fn optional(self) -> &'static [&'static str] {
        match self {
            Self::Runs => &["TYPE", "GPU", "PRICE", "FLEET", "USER", "SUBMITTED"],
            Self::Queue => &["PRIORITY", "USER", "WANTS"],
            Self::Instances => &["PRICE", "BACKEND", "RESOURCES"],
            Self::Events => &["BY"],
        }
    }

    const fn at(self) -> usize {
        match self {
            Self::Runs => 0,
            Self::Queue => 1,
            Self::Instances => 2,
            Self::Events => 3,
        }
    }

    fn step(self, by: usize) -> Self {
        Self::ALL[(self.at() + by) % Self::ALL.len()]
    }

    /// Finds a view by a prefix of its name.
    fn from_prefix(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|view| !word.is_empty() && view.name().starts_with(word))
    }
}

/// A row of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Row {
    /// Identifier in requests: the name of a run, the ID of an instance or event.
    pub(super) key: String,
    /// Run of this row, for its logs, its reasons and stopping it.
    pub(super) run: Option<String>,
    pub(super) cells: Vec<String>,
    /// Status in the second column.
    pub(super) status: String,
}

/// Scrollable text.
#[derive(Clone, Debug, Default)]
pub(super) struct ScrollText {
    pub(super) title: String,
    pub(super) lines: VecDeque<String>,
    /// Index of the first visible line; `None` follows the end.
    pub(super) top: Option<usize>,
    /// The last line is incomplete.
    open: bool,
    /// A carriage return was read: the next character starts the line again.
    returns: bool,
}

impl ScrollText {
    fn put(&mut self, letter: char) {
        if !std::mem::replace(&mut self.open, true) {
            self.lines.push_back(String::new());
        }
        let Some(line) = self.lines.back_mut() else { return };
        if std::mem::replace(&mut self.returns, false) {
            line.clear();
        }
        if line.len() < LINE_BYTES_MAX {
            line.push(letter);
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Pane {
    List,
    Logs(ScrollText),
    Detail(ScrollText),
    Help,
}

/// Prompt in the last line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Prompt {
    None,
    Command(String),
    /// The filter applies while it is typed; Esc restores `before`.
    Filter {
        before: String,
    },
    Stop {
        run: String,
        abort: bool,
    },
}

/// An effect that a key requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Quit,
    /// Follow the output of a run.
    Follow {
        run: String,
    },
    /// Stop following the output.
    Unfollow,
    Describe {
        view: View,
        row: Row,
    },
    Stop {
        run: String,
        abort: bool,
    },
}

#[derive(Clone, Debug)]
pub(super) struct TopState {
    /// Server and project, for the first line.
    pub(super) place: String,
    pub(super) view: View,
    pub(super) pane: Pane,
    pub(super) prompt: Prompt,
    pub(super) filter: String,
    /// Shown in the last line until the next key.
    pub(super) message: String,
    /// Error of the last poll; cleared by the next successful one.
    pub(super) failure: String,
    /// Number of visible lines of a list or text.
    pub(super) page: usize,
    rows: [Vec<Row>; 4],
    selected: [usize; 4],
}

impl TopState {
    pub(super) fn new(place: String) -> Self {
        Self {
            place,
            view: View::Runs,
            pane: Pane::List,
            prompt: Prompt::None,
            filter: String::new(),
            message: String::new(),
            failure: String::new(),
            page: 20,
            rows: Default::default(),
            selected: [0; 4],
        }
    }

    /// Number of rows before filtering.
    pub(super) fn count(&self, view: View) -> usize {
        self.rows[view.at()].len()
    }

    pub(super) fn all(&self, view: View) -> &[Row] {
        &self.rows[view.at()]
    }

    /// Rows that match the filter.
    pub(super) fn shown(&self) -> Vec<&Row> {
        let wanted = self.filter.to_lowercase();
        let fits = |row: &&Row| row.cells.iter().any(|cell| cell.to_lowercase().contains(&wanted));
        self.rows[self.view.at()].iter().filter(fits).collect()
    }

    pub(super) fn cursor(&self) -> usize {
        self.selected[self.view.at()].min(self.shown().len().saturating_sub(1))
    }

    pub(super) fn current(&self) -> Option<&Row> {
        self.shown().get(self.cursor()).copied()
    }

    /// Replaces a list. The selected row stays selected at its new position.
    pub(super) fn update(&mut self, view: View, rows: Vec<Row>) {
        let here = self.view;
        self.view = view;
        let held = self.current().map(|row| row.key.clone());
        // If the last event is selected, the selection stays at the end.
        let at_end = view == View::Events && self.cursor() + 1 >= self.shown().len();
        self.rows[view.at()] = rows;
        let shown = self.shown();
        let found = held.and_then(|key| shown.iter().position(|row| row.key == key));
        let last = shown.len().saturating_sub(1);
        self.selected[view.at()] = match found {
            _ if at_end => last,
            Some(found) => found,
            None => self.selected[view.at()].min(last),
        };
        self.view = here;
    }

    /// Appends output to the log. A carriage return overwrites the line, as progress bars do.
    pub(super) fn append_log(&mut self, piece: &str) {
        let Pane::Logs(text) = &mut self.pane else { return };
        for letter in piece.chars() {
            match letter {
                '\n' => {
                    if !text.open {
                        text.lines.push_back(String::new());
                    }
                    (text.open, text.returns) = (false, false);
                }
                '\r' => text.returns = true,
                _ => text.put(letter),
            }
        }
        while text.lines.len() > LOG_LINES_MAX {
            text.lines.pop_front();
            text.top = text.top.map(|top| top.saturating_sub(1));
        }
    }

    /// Shows the result of `Effect::Describe`.
    pub(super) fn describe(&mut self, title: String, lines: Vec<String>) {
        self.pane =
            Pane::Detail(ScrollText { title, lines: lines.into(), top: Some(0), ..ScrollText::default() });
    }

    /// Applies a key and returns the required effect.
    pub(super) fn press(&mut self, key: Key) -> Option<Effect> {
        self.message.clear();
        if key == Key::Interrupt {
            return Some(Effect::Quit);
        }
        match std::mem::replace(&mut self.prompt, Prompt::None) {
            Prompt::None => {}
            Prompt::Command(typed) => return self.edit_command(typed, key),
            Prompt::Filter { before } => {
                self.edit_filter(before, key);
                return None;
            }
            Prompt::Stop { run, abort } => return self.confirm(run, abort, key),
        }
        match key {
            Key::Char(':') => self.prompt = Prompt::Command(String::new()),
            Key::Char('?') => return self.open(Pane::Help),
            Key::Char('q') | Key::Esc => return self.go_back(key),
            Key::Char('l') => return self.follow(),
            Key::Char('d' | 'y') => return self.describe_current(),
            Key::Char('s') => self.prompt_stop(false),
            Key::Char('x') => self.prompt_stop(true),
            Key::Char(_)
            | Key::Enter
            | Key::Up
            | Key::Down
            | Key::PageUp
            | Key::PageDown
            | Key::Home
            | Key::End
            | Key::Backspace
            | Key::Tab
            | Key::BackTab
            | Key::Interrupt => match &mut self.pane {
                Pane::List => return self.press_in_list(key),
                Pane::Logs(text) | Pane::Detail(text) => scroll(text, key, self.page),
                Pane::Help => {}
            },
        }
        None
    }

    fn press_in_list(&mut self, key: Key) -> Option<Effect> {
        let last = self.shown().len().saturating_sub(1);
        let (at, page) = (self.cursor(), self.page.max(1));
        let to = match key {
            Key::Up | Key::Char('k') => at.saturating_sub(1),
            Key::Down | Key::Char('j') => (at + 1).min(last),
            Key::PageUp => at.saturating_sub(page),
            Key::PageDown | Key::Char(' ') => (at + page).min(last),
            Key::Home | Key::Char('g') => 0,
            Key::End | Key::Char('G') => last,
            Key::Tab => return self.switch_view(self.view.step(1)),
            Key::BackTab => return self.switch_view(self.view.step(View::ALL.len() - 1)),
            Key::Char(digit @ '1'..='4') => {
                let at = digit.to_digit(10).and_then(|digit| usize::try_from(digit).ok()).unwrap_or(1);
                return self.switch_view(View::ALL[at - 1]);
            }
            Key::Char('/') => {
                self.prompt = Prompt::Filter { before: self.filter.clone() };
                return None;
            }
            // Enter on a run shows its output.
            Key::Enter if matches!(self.view, View::Runs) => return self.follow(),
            Key::Enter => return self.describe_current(),
            Key::Char(_) | Key::Esc | Key::Backspace | Key::Interrupt => at,
        };
        self.selected[self.view.at()] = to;
        None
    }

    fn switch_view(&mut self, view: View) -> Option<Effect> {
        self.view = view;
        self.open(Pane::List)
    }

    /// Opens another pane, and stops following the output.
    fn open(&mut self, pane: Pane) -> Option<Effect> {
        let followed = matches!(self.pane, Pane::Logs(_));
        self.pane = pane;
        followed.then_some(Effect::Unfollow)
    }

    /// Leaves a pane, a filter or the program, one step at a time.
    fn go_back(&mut self, key: Key) -> Option<Effect> {
        match &self.pane {
            Pane::Logs(_) | Pane::Detail(_) | Pane::Help => self.open(Pane::List),
            Pane::List if !self.filter.is_empty() => {
                self.filter.clear();
                None
            }
            // Esc never quits, because it is easily pressed once too often.
            Pane::List if key == Key::Esc => None,
            Pane::List => Some(Effect::Quit),
        }
    }

    fn selected_run(&mut self) -> Option<String> {
        let run = self.current().and_then(|row| row.run.clone());
        if run.is_none() {
            self.message = "no run is selected".to_owned();
        }
        run
    }

    fn follow(&mut self) -> Option<Effect> {
        let run = self.selected_run()?;
        let title = format!("logs of {run}");
        self.pane = Pane::Logs(ScrollText { title, ..ScrollText::default() });
        Some(Effect::Follow { run })
    }

    fn describe_current(&mut self) -> Option<Effect> {
        let row = self.current().cloned();
        if row.is_none() {
            self.message = "nothing is selected".to_owned();
        }
        Some(Effect::Describe { view: self.view, row: row? })
    }

    fn prompt_stop(&mut self, abort: bool) {
        if let Some(run) = self.selected_run() {
            self.prompt = Prompt::Stop { run, abort };
        }
    }

    /// Only `y` confirms.
    fn confirm(&mut self, run: String, abort: bool, key: Key) -> Option<Effect> {
        if key != Key::Char('y') {
            self.message = "nothing was stopped".to_owned();
            return None;
        }
        self.message = format!("sending the stop request for `{run}`");
        Some(Effect::Stop { run, abort })
    }

    fn edit_filter(&mut self, before: String, key: Key) {
        match key {
            Key::Enter => return,
            Key::Esc => {
                self.filter = before;
                return;
            }
            Key::Backspace => {
                self.filter.pop();
            }
            Key::Char(letter) if self.filter.chars().count() < INPUT_CHARS_MAX => self.filter.push(letter),
            Key::Char(_)
            | Key::Up
            | Key::Down
            | Key::PageUp
            | Key::PageDown
            | Key::Home
            | Key::End
            | Key::Tab
            | Key::BackTab
            | Key::Interrupt => {}
        }
        self.selected[self.view.at()] = 0;
        self.prompt = Prompt::Filter { before };
    }

    fn edit_command(&mut self, mut typed: String, key: Key) -> Option<Effect> {
        match key {
            Key::Enter => return self.run_command(typed.trim()),
            Key::Esc => return None,
            Key::Backspace if typed.pop().is_none() => return None,
            Key::Char(letter) if typed.chars().count() < INPUT_CHARS_MAX => typed.push(letter),
            Key::Tab => {
                if let Some(view) = View::from_prefix(&typed) {
                    typed = view.name().to_owned();
                }
            }
            Key::Char(_)
            | Key::Backspace
            | Key::Up
            | Key::Down
            | Key::PageUp
            | Key::PageDown
            | Key::Home
            | Key::End
            | Key::BackTab
            | Key::Interrupt => {}
        }
        self.prompt = Prompt::Command(typed);
        None
    }

    fn run_command(&mut self, typed: &str) -> Option<Effect> {
        match typed {
            "" => None,
            "q" | "quit" | "exit" => Some(Effect::Quit),
            "h" | "help" => self.open(Pane::Help),
            word => match View::from_prefix(word) {
                Some(view) => self.switch_view(view),
                None => {
                    self.message = format!(
                        "unknown command `{word}`: expected runs, queue, instances, events, help or quit"
                    );
                    None
                }
            },
        }
    }
}

fn scroll(text: &mut ScrollText, key: Key, page: usize) {
    let page = page.max(1);
    let end = text.lines.len().saturating_sub(page);
    let top = text.top.unwrap_or(end).min(end);
    let to = match key {
        Key::Up | Key::Char('k') => top.saturating_sub(1),
        Key::Down | Key::Char('j') => top + 1,
        Key::PageUp => top.saturating_sub(page),
        Key::PageDown | Key::Char(' ') => top + page,
        Key::Home | Key::Char('g') => 0,
        Key::End | Key::Char('G') => end,
        Key::Char(_) | Key::Enter | Key::Esc | Key::Backspace | Key::Tab | Key::BackTab | Key::Interrupt => {
            return;
        }
    };
    // At the end, follow new lines.
    text.top = (to < end).then_some(to);
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
