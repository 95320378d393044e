use super::{Effect, Key, Pane, Prompt, Row, TopState, View};

fn row(name: &str, status: &str) -> Row {
    Row {
        key: name.to_owned(),
        run: Some(name.to_owned()),
        cells: vec![name.to_owned(), status.to_owned()],
        status: status.to_owned(),
    }
}

fn state() -> TopState {
    let mut state = TopState::new("main".to_owned());
    state.update(View::Runs, vec![row("one", "running"), row("two", "done"), row("three", "running")]);
    state.update(View::Queue, vec![row("waits", "pending")]);
    state
}

fn press(state: &mut TopState, keys: &str) -> Option<Effect> {
    let mut last = None;
    for letter in keys.chars() {
        let key = match letter {
            '\n' => Key::Enter,
            '\u{1b}' => Key::Esc,
            '\t' => Key::Tab,
            '\u{8}' => Key::Backspace,
            other => Key::Char(other),
        };
        last = state.press(key);
    }
    last
}

fn selected(state: &TopState) -> &str {
    state.current().map_or("", |row| row.key.as_str())
}

#[test]
fn the_selection_stays_with_its_row_when_the_list_changes() {
    let mut state = state();
    press(&mut state, "j");
    assert_eq!(selected(&state), "two");
    state.update(View::Runs, vec![row("new", "submitted"), row("one", "done"), row("two", "done")]);
    assert_eq!(selected(&state), "two");
    state.update(View::Runs, vec![row("new", "submitted")]);
    assert_eq!(selected(&state), "new");
    state.update(View::Runs, Vec::new());
    assert_eq!(selected(&state), "");
    assert_eq!(press(&mut state, "jjkGg"), None);
}

#[test]
fn updating_another_view_keeps_the_selection() {
    let mut state = state();
    press(&mut state, "G");
    state.update(View::Queue, Vec::new());
    assert_eq!((state.view, selected(&state)), (View::Runs, "three"));
}

#[test]
fn filter_applies_while_typed_and_escape_restores_the_previous_one() {
    let mut state = state();
    press(&mut state, "/RUN");
    assert_eq!(state.shown().len(), 2);
    press(&mut state, "\n");
    assert_eq!((state.filter.as_str(), &state.prompt), ("RUN", &Prompt::None));
    press(&mut state, "/x\u{1b}");
    assert_eq!(state.filter, "RUN");
    // `q` leaves the filter first, not the program.
    assert_eq!(press(&mut state, "q"), None);
    assert_eq!(state.shown().len(), 3);
    assert_eq!(press(&mut state, "\u{1b}"), None);
    assert_eq!(press(&mut state, "q"), Some(Effect::Quit));
}

#[test]
fn view_commands_accept_any_prefix_of_the_view_name() {
    let mut state = state();
    for (typed, view) in [(":inst\n", View::Instances), (":e\n", View::Events), (":runs\n", View::Runs)] {
        assert_eq!(press(&mut state, typed), None);
        assert_eq!(state.view, view);
    }
    press(&mut state, "\t");
    assert_eq!(state.view, View::Queue);
    press(&mut state, "4");
    assert_eq!(state.view, View::Events);
    press(&mut state, ":nonsense\n");
    assert!(state.message.contains("unknown command `nonsense`"));
    press(&mut state, ":r\u{8}\u{8}");
    assert_eq!(state.prompt, Prompt::None, "an empty command goes away");
    assert_eq!(press(&mut state, ":q\n"), Some(Effect::Quit));
}

#[test]
fn enter_opens_the_logs_of_the_selected_run() {
    let mut state = state();
    assert_eq!(press(&mut state, "j\n"), Some(Effect::Follow { run: "two".to_owned() }));
    assert!(matches!(state.pane, Pane::Logs(_)));
    assert_eq!(press(&mut state, "\u{1b}"), Some(Effect::Unfollow));
    assert!(matches!(state.pane, Pane::List));
    let Some(Effect::Describe { view, row }) = press(&mut state, "d") else { panic!("no description") };
    assert_eq!((view, row.key.as_str()), (View::Runs, "two"));
    state.describe("two".to_owned(), vec!["why".to_owned()]);
    assert_eq!(press(&mut state, "q"), None);
    press(&mut state, "?");
    assert!(matches!(state.pane, Pane::Help));
    // A list without runs has nothing to follow.
    press(&mut state, "q3");
    assert_eq!(press(&mut state, "l"), None);
    assert_eq!(state.message, "no run is selected");
}

#[test]
fn stopping_a_run_requires_confirmation() {
    let mut state = state();
    assert_eq!(press(&mut state, "s"), None);
    assert_eq!(state.prompt, Prompt::Stop { run: "one".to_owned(), abort: false });
    assert_eq!(press(&mut state, "\n"), None);
    assert_eq!((&state.prompt, state.message.as_str()), (&Prompt::None, "nothing was stopped"));
    assert_eq!(press(&mut state, "sy"), Some(Effect::Stop { run: "one".to_owned(), abort: false }));
    assert_eq!(press(&mut state, "xy"), Some(Effect::Stop { run: "one".to_owned(), abort: true }));
    assert_eq!(state.press(Key::Interrupt), Some(Effect::Quit));
}

#[test]
fn log_pane_joins_chunks_and_follows_until_the_user_scrolls() {
    let mut state = state();
    state.page = 3;
    press(&mut state, "\n");
    state.append_log("a\r\nb");
    state.append_log("c\nd\n");
    let lines = |state: &TopState| match &state.pane {
        Pane::Logs(text) => (text.lines.iter().cloned().collect::<Vec<_>>(), text.top),
        Pane::List | Pane::Detail(_) | Pane::Help => panic!("no logs"),
    };
    assert_eq!(lines(&state), (vec!["a".to_owned(), "bc".to_owned(), "d".to_owned()], None));
    state.append_log("e\nf\n");
    state.append_log("1%\r2%\r\n\n");
    let (all, _) = lines(&state);
    assert_eq!(all[5..], ["2%".to_owned(), String::new()]);
    press(&mut state, "k");
    assert_eq!(lines(&state).1, Some(3));
    press(&mut state, "G");
    assert_eq!(lines(&state).1, None);
    for _ in 0..6000 {
        state.append_log("x\n");
    }
    assert_eq!(lines(&state).0.len(), 5000);
    state.append_log(&"y".repeat(10_000));
    state.append_log(&"y".repeat(10_000));
    assert_eq!(lines(&state).0.last().map(String::len), Some(4000));
}

#[test]
fn event_view_follows_new_events_until_the_user_scrolls_up() {
    let mut state = state();
    press(&mut state, "4");
    state.update(View::Events, vec![row("e1", ""), row("e2", "")]);
    state.update(View::Events, vec![row("e1", ""), row("e2", ""), row("e3", "")]);
    assert_eq!(selected(&state), "e3");
    press(&mut state, "k");
    state.update(View::Events, vec![row("e2", ""), row("e3", ""), row("e4", "")]);
    assert_eq!(selected(&state), "e2");
}
