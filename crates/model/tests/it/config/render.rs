//! Rendering of problems for people and for programs.

use windlass_model::config::{self, error::Code};

#[track_caller]
fn rendered(text: &str, expected: &str) {
    let problems = config::parse(text).unwrap_err();
    assert_eq!(config::render(&problems, "job.yml", text), expected);
}

#[test]
fn an_unknown_field_is_underlined_with_a_suggestion() {
    rendered(
        "type: task\ncommands: [x]\nresources:\n  gpu:\n    cuont: 2\n",
        "\
error[C011]: unknown field `cuont`
 --> job.yml:5:5
  |
5 |     cuont: 2
  |     ^^^^^
  = hint: did you mean `count`?
",
    );
}

#[test]
fn an_invalid_value_is_underlined_with_a_suggestion() {
    rendered(
        "type: task\ncommands: [x]\nspot_policy: ondemand\n",
        "\
error[C014]: `ondemand` is not a valid value for `spot_policy`
 --> job.yml:3:14
  |
3 | spot_policy: ondemand
  |              ^^^^^^^^
  = hint: did you mean `on-demand`?
",
    );
}

#[test]
fn wide_characters_and_tabs_keep_the_caret_in_place() {
    rendered(
        "type: task\ncommands: [x]\ntags: {\"日本\": x,\t\"é\": y}\n",
        "\
error[C014]: invalid tag `日本`: a tag key consists of 1 to 60 letters, digits, `_` and `-`
 --> job.yml:3:8
  |
3 | tags: {\"日本\": x,    \"é\": y}
  |        ^^^^^^

error[C014]: invalid tag `é`: a tag key consists of 1 to 60 letters, digits, `_` and `-`
 --> job.yml:3:17
  |
3 | tags: {\"日本\": x,    \"é\": y}
  |                      ^^^
",
    );
}

#[test]
fn a_reference_is_underlined_inside_its_value() {
    rendered(
        "type: task\ncommands:\n  - python train.py ${{ run.arg }} --fast\n",
        "\
error[C018]: `run.arg` is not available here; available names: `run.args`, `secrets.NAME`
 --> job.yml:3:21
  |
3 |   - python train.py ${{ run.arg }} --fast
  |                     ^^^^^^^^^^^^^^
",
    );
    rendered(
        "type: task\ncommands: ['a ${{ run.arg }}']\n",
        "\
error[C018]: `run.arg` is not available here; available names: `run.args`, `secrets.NAME`
 --> job.yml:2:15
  |
2 | commands: ['a ${{ run.arg }}']
  |               ^^^^^^^^^^^^^^
",
    );
}

#[test]
fn a_duplicate_key_error_names_both_positions() {
    rendered(
        "type: task\nname: one\nimage: a\nname: two\n",
        "\
error[C003]: duplicate key `name`
 --> job.yml:4:1
  |
4 | name: two
  | ^^^^
  = hint: first used at line 2, column 1
",
    );
}

#[test]
fn syntax_errors_report_their_line() {
    let problems = config::parse("type: task\ncommands: [x\n").unwrap_err();
    assert_eq!(problems[0].code, Code::Syntax);
    assert!(problems[0].span.start.line >= 2, "{problems:?}");
    let problems = config::parse("type: task\nname: a\nenv: {A: 1]\n").unwrap_err();
    assert_eq!((problems[0].code, problems[0].span.start.line), (Code::Syntax, 3));
}

#[test]
fn a_missing_field_is_reported_at_the_first_line_of_its_mapping() {
    rendered(
        "# a service\ntype: service\nimage: a\n",
        "\
error[C012]: missing field `port`
 --> job.yml:2:1
  |
2 | type: service
  | ^^^^^^^^^^^^^
",
    );
}

#[test]
fn a_bare_boolean_where_text_is_meant_gets_a_hint() {
    rendered(
        "type: task\ncommands:\n  - yes\n",
        "\
error[C013]: `commands` must be a string, not a boolean (true)
 --> job.yml:3:5
  |
3 |   - yes
  |     ^^^
  = hint: quote the value to make it a string: \"yes\"
",
    );
}

#[test]
fn a_very_long_line_is_cut_around_the_culprit() {
    let text = format!("type: task\ncommands: [{}, yes]\n", "x".repeat(5000));
    let problems = config::parse(&text).unwrap_err();
    let shown = problems[0].render("job.yml", &text);
    assert!(shown.len() < 600, "{shown}");
    let lines: Vec<&str> = shown.lines().collect();
    let column = lines[4].find('^').unwrap() - lines[4].find('|').unwrap();
    let source: String = lines[3].chars().skip(lines[3].find('|').unwrap() + column).take(3).collect();
    assert_eq!(source, "yes");
}

#[test]
fn problems_serialize_to_json_with_code_and_position() {
    let problems = config::parse("type: task\ncommands: [x]\nnode: 2\n").unwrap_err();
    let json = serde_json::to_value(&problems).unwrap();
    let expected = serde_json::json!([{
        "code": "C011", "kind": "unknown-field", "message": "unknown field `node`", "path": "node",
        "line": 3, "column": 1, "end_line": 3, "end_column": 5, "hint": "did you mean `nodes`?",
    }]);
    assert_eq!(json, expected);
}

#[test]
fn codes_are_unique_and_documented() {
    let mut ids: Vec<&str> = Code::ALL.iter().map(|code| code.id()).collect();
    ids.dedup();
    assert_eq!(ids.len(), Code::ALL.len());
    let table = include_str!("../../../src/config/error.rs");
    for code in Code::ALL {
        assert!(table.contains(&format!("//! | {} | {} |", code.id(), code.name())), "{code:?}");
    }
}
