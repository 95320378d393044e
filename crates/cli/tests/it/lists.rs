//! The commands that list things, against a server that has none, and with one.

use crate::{snapshot::Story, stage::Stage};

#[test]
fn an_empty_list_says_what_makes_one() {
    let stage = Stage::new();
    let mut story = Story::new("lists-empty", &stage);
    for thing in ["ps", "fleet", "volume", "gateway"] {
        for format in ["table", "json", "jsonl", "name"] {
            story.run(&[thing, "-o", format]);
        }
    }
    story.end();
}

#[test]
fn nothing_is_deleted_where_nobody_can_be_asked() {
    let stage = Stage::new();
    let mut story = Story::new("delete-unasked", &stage);
    for thing in ["volume", "gateway"] {
        story.run(&[thing, "delete", "some"]);
    }
    story.run(&["fleet", "delete", "some"]);
    story.end();
}
