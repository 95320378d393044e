//! Renders the state, without decisions.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Cell, Paragraph, Row as TableRow, Table},
};

use super::state::{Pane, Prompt, Row, ScrollText, TopState, View};
use crate::output::{style::Colour, table::truncate};

/// Lines around a list: the title, the tabs, the heading and the last line.
const FRAME_LINES: u16 = 4;
/// Number of spaces between two columns.
const GAP: u16 = 2;
/// Width that a message gets before another column is left out for it.
const MESSAGE_WIDTH_USEFUL: usize = 24;
/// Minimum width of a truncated column.
const WIDTH_MIN: usize = 8;
const HELP: &[&str] = &[
    "1 2 3 4, Tab     runs, queue, instances, events",
    ":runs …          select a view by its name or a prefix of it",
    "/                filter by any column; Esc clears the filter",
    "j k, arrows      down and up; g, G first and last; Space, PgUp, PgDn by page",
    "Enter            open the logs of a run, else a description",
    "l                follow the logs of the run",
    "d                describe: status, why it waits, what does not fit",
    "s                stop the run, after a confirmation; x aborts it without a grace period",
    "q, Esc           back; q in a list, :q or Ctrl-C quits",
];

/// Number of lines of a list or text that fit on the screen.
pub(super) fn page_size(height: u16) -> usize {
    usize::from(height.saturating_sub(FRAME_LINES)).max(1)
}

/// Colours, if the terminal shows them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Palette {
    pub(super) colours: bool,
}

impl Palette {
    fn status(self, text: &str) -> Style {
        if !self.colours {
            return Style::new();
        }
        match Colour::for_status(text) {
            Colour::None | Colour::Bold => Style::new(),
            Colour::Dim => Style::new().add_modifier(Modifier::DIM),
            Colour::Green => Style::new().fg(Color::Green),
            Colour::Yellow => Style::new().fg(Color::Yellow),
            Colour::Red => Style::new().fg(Color::Red),
            Colour::Blue => Style::new().fg(Color::Blue),
            Colour::Magenta => Style::new().fg(Color::Magenta),
            Colour::Cyan => Style::new().fg(Color::Cyan),
        }
    }
}

pub(super) fn draw_screen(frame: &mut Frame<'_>, state: &TopState, paint: Palette) {
    let parts = [Constraint::Length(1), Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)];
    let [place, tabs, body, last] = Layout::vertical(parts).areas(frame.area());
    frame.render_widget(Paragraph::new(draw_heading(state)), place);
    frame.render_widget(Paragraph::new(draw_tabs(state)), tabs);
    match &state.pane {
        Pane::List => draw_list(frame, body, state, paint),
        Pane::Logs(text) | Pane::Detail(text) => self::draw_text(frame, body, text),
        Pane::Help => {
            let lines: Vec<Line<'_>> = HELP.iter().map(|line| Line::raw(*line)).collect();
            frame.render_widget(Paragraph::new(lines), body);
        }
    }
    frame.render_widget(Paragraph::new(draw_prompt(state, paint)), last);
}

fn bold(text: String) -> Span<'static> {
    Span::styled(text, Style::new().add_modifier(Modifier::BOLD))
}

fn draw_heading(state: &TopState) -> Line<'static> {
    let running = state.all(View::Runs).iter().filter(|row| row.status.starts_with("running")).count();
    let counts = format!(
        "  {running} running, {} waiting, {} instances",
        state.count(View::Queue),
        state.count(View::Instances)
    );
    Line::from(vec![bold(state.place.clone()), Span::raw(counts)])
}

fn draw_tabs(state: &TopState) -> Line<'static> {
    let mut spans = Vec::new();
    for (number, view) in (1_u8..).zip(View::ALL) {
        let text = format!("{number} {} ({})", view.name(), state.count(view));
        let chosen = view == state.view;
        // Brackets mark the selection without colours.
        let text = if chosen { format!("[{text}]") } else { format!(" {text} ") };
        spans.push(if chosen { bold(text) } else { Span::raw(text) });
    }
    if let Pane::Logs(text) | Pane::Detail(text) = &state.pane {
        spans.push(bold(format!("  {}", text.title)));
    }
    if !state.filter.is_empty() {
        spans.push(Span::raw(format!("  /{}", state.filter)));
    }
    Line::from(spans)
}

fn draw_list(frame: &mut Frame<'_>, area: Rect, state: &TopState, paint: Palette) {
    let (shown, cursor, page) = (state.shown(), state.cursor(), state.page.max(1));
    let head = state.view.head();
    if shown.is_empty() {
        let message = if state.count(state.view) == 0 {
            "nothing here"
        } else {
            "nothing matches the filter; press Esc to clear it"
        };
        frame.render_widget(Paragraph::new(vec![Line::raw(""), Line::raw(format!("  {message}"))]), area);
        return;
    }
    // Scrolls by whole pages, so that visible rows do not move.
    let from = cursor / page * page;
    let visible: Vec<&Row> = shown.iter().copied().skip(from).take(page).collect();
    let widest = |column: usize| {
        let cells = visible.iter().filter_map(|row| row.cells.get(column)).map(|cell| cell.chars().count());
        cells.max().unwrap_or(0).max(head[column].len())
    };
    let last = head.len() - 1;
    let widths: Vec<usize> = (0..head.len()).map(widest).collect();
    let columns = fit_columns(head, state.view.optional(), &widths, area.width.into());
    let constraints = columns.iter().map(|(column, width)| {
        let width = Constraint::Length(u16::try_from(*width).unwrap_or(u16::MAX));
        if *column == last { Constraint::Fill(1) } else { width }
    });
    let rows = visible.iter().enumerate().map(|(at, row)| {
        let cells = columns.iter().filter_map(|(column, width)| {
            let (column, text) = (*column, row.cells.get(*column)?);
            // Events have no status; other rows have it in the second column.
            let style =
                if column == 1 && !row.status.is_empty() { paint.status(&row.status) } else { Style::new() };
            Some(Cell::from(Span::styled(truncate(text, *width), style)))
        });
        let row = TableRow::new(cells);
        if from + at == cursor { row.style(Style::new().add_modifier(Modifier::REVERSED)) } else { row }
    });
    let header = TableRow::new(columns.iter().map(|(column, _)| bold(head[*column].to_owned())));
    frame.render_widget(Table::new(rows, constraints).header(header).column_spacing(GAP), area);
}

/// Returns the columns to show and their widths. The last column, which has the message, gets a useful width: others are
/// left out or truncated for it.
fn fit_columns(head: &[&str], optional: &[&str], widths: &[usize], room: usize) -> Vec<(usize, usize)> {
    let gap = usize::from(GAP);
    let last = widths.len().saturating_sub(1);
    let mut columns: Vec<(usize, usize)> = widths.iter().copied().enumerate().collect();
    let wanted = widths[last].min(MESSAGE_WIDTH_USEFUL);
    let taken = |columns: &[(usize, usize)]| -> usize {
        columns.iter().filter(|(column, _)| *column != last).map(|(_, width)| width + gap).sum()
    };
    for name in optional {
        if taken(&columns) + wanted <= room {
            break;
        }
        columns.retain(|(column, _)| head[*column] != *name);
    }
    while taken(&columns) + wanted > room {
        let others = columns.iter_mut().filter(|(column, width)| *column != last && *width > WIDTH_MIN);
        let Some((_, width)) = others.max_by_key(|(_, width)| *width) else { break };
        *width -= 1;
    }
    let left = room.saturating_sub(taken(&columns)).max(1);
    if let Some((_, width)) = columns.last_mut() {
        *width = left;
    }
    columns
}

/// Draws text; long lines are truncated.
fn draw_text(frame: &mut Frame<'_>, area: Rect, text: &ScrollText) {
    let height = usize::from(area.height);
    let end = text.lines.len().saturating_sub(height);
    let top = text.top.unwrap_or(end).min(end);
    let lines: Vec<Line<'_>> =
        text.lines.iter().skip(top).take(height).map(|line| Line::raw(line.replace('\t', "    "))).collect();
    frame.render_widget(Paragraph::new(lines), area);
}

fn draw_prompt(state: &TopState, paint: Palette) -> Line<'static> {
    match &state.prompt {
        Prompt::Command(typed) => return Line::raw(format!(":{typed}_")),
        Prompt::Filter { .. } => return Line::raw(format!("/{}_", state.filter)),
        Prompt::Stop { run, abort: false } => return Line::from(bold(format!("Stop `{run}`? [y/n]"))),
        Prompt::Stop { run, abort: true } => {
            return Line::from(bold(format!("Abort `{run}` without a grace period? [y/n]")));
        }
        Prompt::None => {}
    }
    if !state.message.is_empty() {
        return Line::raw(state.message.clone());
    }
    if !state.failure.is_empty() {
        return Line::from(Span::styled(state.failure.clone(), paint.status("error")));
    }
    let keys = match state.pane {
        Pane::List => "Enter open  l logs  d describe  s stop  / filter  : command  ? help  q quit",
        Pane::Logs(_) => "q back  k up  G follow the end  s stop  ? help",
        Pane::Detail(_) | Pane::Help => "q back  j k scroll",
    };
    Line::from(Span::styled(keys, Style::new().add_modifier(Modifier::DIM)))
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::{Palette, draw_screen, page_size};
    use crate::commands::top::state::{Key, Row, TopState, View};

    fn row(name: &str, status: &str) -> Row {
        let cells =
            [name, status, "task", "ada", "rack", "-", "$1.25", "3 min ago", "-"].map(str::to_owned).to_vec();
        Row { key: name.to_owned(), run: Some(name.to_owned()), cells, status: status.to_owned() }
    }

    fn drawn(state: &mut TopState, height: u16) -> Vec<String> {
        drawn_in(state, 76, height)
    }

    fn drawn_in(state: &mut TopState, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        state.page = page_size(height);
        terminal.draw(|frame| draw_screen(frame, state, Palette { colours: true })).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y: u16| -> String { (0..width).map(|x| buffer[(x, y)].symbol()).collect() };
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    fn state() -> TopState {
        let mut state = TopState::new("main at http://localhost:3000".to_owned());
        state.update(View::Runs, vec![row("train", "running"), row("hello", "done")]);
        state
    }

    #[test]
    fn runs_view_has_a_header_a_table_and_a_key_legend() {
        assert_eq!(
            drawn(&mut state(), 7),
            [
                "main at http://localhost:3000  1 running, 0 waiting, 0 instances",
                "[1 runs (2)] 2 queue (0)  3 instances (0)  4 events (0)",
                "NAME   STATUS   TYPE  USER  FLEET  GPU  PRICE  SUBMITTED  MESSAGE",
                "train  running  task  ada   rack   -    $1.25  3 min ago  -",
                "hello  done     task  ada   rack   -    $1.25  3 min ago  -",
                "",
                "Enter open  l logs  d describe  s stop  / filter  : command  ? help  q quit",
            ]
        );
    }

    #[test]
    fn a_message_is_shown_at_80_columns_instead_of_less_important_columns() {
        let mut state = state();
        let cells = [
            "llama-finetune-2",
            "pending",
            "dev-environment",
            "ada.lovelace",
            "rack-of-the-lab",
            "8x H100",
            "$12.25",
            "13 min ago",
            "attempt 2 failed: the commands exited with status 4; attempt 3 begins soon",
        ];
        let cells = cells.map(str::to_owned).to_vec();
        let long =
            Row { key: "a".to_owned(), run: Some("a".to_owned()), cells, status: "pending".to_owned() };
        state.update(View::Runs, vec![long]);
        let lines = drawn_in(&mut state, 80, 6);
        assert_eq!(lines[2], "NAME              STATUS   USER          SUBMITTED   MESSAGE");
        let row = "llama-finetune-2  pending  ada.lovelace  13 min ago  attempt 2 failed: the comm…";
        assert_eq!(lines[3], row);
        // Even the name is truncated before the message.
        let lines = drawn_in(&mut state, 40, 6);
        assert!(lines[3].contains("attempt 2 failed: th…"), "{lines:?}");
        let whole = drawn_in(&mut state, 200, 6).remove(3);
        assert!(whole.ends_with("attempt 3 begins soon") && whole.contains("rack-of-the-lab"), "{whole}");
    }

    #[test]
    fn a_long_run_message_is_truncated_without_moving_other_columns() {
        let mut state = state();
        let mut waits = row("waits", "pending");
        waits.cells[8] = "no place for it now: every machine is full, and more".to_owned();
        state.update(View::Runs, vec![waits]);
        let line = drawn(&mut state, 6).remove(3);
        assert!(
            line.starts_with("waits  pending  ada   rack   -    $1.25  3 min ago  no place for it now: "),
            "{line}"
        );
        assert!(line.ends_with('…'), "{line}");
    }

    #[test]
    fn filter_prompt_and_messages_are_visible() {
        let mut state = state();
        for letter in "/hel".chars() {
            state.press(Key::Char(letter));
        }
        let lines = drawn(&mut state, 6);
        assert!(
            lines[1].ends_with("/hel") && lines[3].starts_with("hello") && lines[5] == "/hel_",
            "{lines:?}"
        );
        state.press(Key::Enter);
        state.press(Key::Char('s'));
        assert_eq!(drawn(&mut state, 6)[5], "Stop `hello`? [y/n]");
        state.press(Key::Char('n'));
        assert_eq!(drawn(&mut state, 6)[5], "nothing was stopped");
        state.press(Key::Char('3'));
        assert_eq!(drawn(&mut state, 6)[3].trim(), "nothing here");
        state.failure = "error: reach the server".to_owned();
        assert_eq!(drawn(&mut state, 6)[5], "error: reach the server");
    }

    #[test]
    fn log_pane_shows_the_tail_and_strips_control_characters() {
        let mut state = state();
        state.press(Key::Enter);
        for number in 0..9 {
            state.append_log(&format!("line {number}\n"));
        }
        state.append_log("\u{1b}[2Jx");
        let lines = drawn(&mut state, 6);
        assert!(lines[1].ends_with("logs of train"), "{lines:?}");
        assert_eq!(lines[2..5], ["line 7", "line 8", "[2Jx"]);
        state.press(Key::Home);
        assert_eq!(drawn(&mut state, 6)[2], "line 0");
    }

    #[test]
    fn top_draws_at_any_terminal_height() {
        for height in 1..8 {
            let mut state = state();
            drawn(&mut state, height);
            state.press(Key::Char('?'));
            drawn(&mut state, height);
        }
    }
}
