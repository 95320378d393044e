//! Words that names, doc comments and texts avoid (CONTRIBUTING.md, "Names and English").

use std::collections::BTreeSet;

use anyhow::Result;

use super::Problems;
use crate::{
    texts::{self, Kind, Text},
    workspace::Workspace,
};

/// Type names that are participles, question words or metaphors: they do not name the thing.
const NAMES: &[&str] = &[
    "Asked",
    "Asker",
    "Asking",
    "Because",
    "Bell",
    "Bench",
    "Beside",
    "Blown",
    "Books",
    "Cast",
    "Chorus",
    "Chosen",
    "Crank",
    "Crew",
    "Deaf",
    "Dice",
    "Door",
    "Ear",
    "Errand",
    "Eye",
    "Fastened",
    "Fate",
    "Fenced",
    "Foreign",
    "Found",
    "Given",
    "Glance",
    "Grave",
    "Graves",
    "Ground",
    "Hands",
    "Happened",
    "Happening",
    "Has",
    "Heard",
    "Held",
    "Hollow",
    "How",
    "Kept",
    "Known",
    "Lasting",
    "Learned",
    "Lent",
    "Life",
    "Look",
    "Looked",
    "Made",
    "Maker",
    "Manner",
    "Moved",
    "Named",
    "Nobody",
    "Nowhere",
    "Passage",
    "Patience",
    "Place",
    "Played",
    "Premises",
    "Pulled",
    "Reach",
    "Road",
    "Said",
    "Seated",
    "Seen",
    "Shelf",
    "Shown",
    "Sits",
    "Stage",
    "Standing",
    "Storm",
    "Story",
    "Stranger",
    "Stray",
    "Stretch",
    "Sung",
    "Surroundings",
    "Taken",
    "Tally",
    "Told",
    "Traveller",
    "Tries",
    "Trouble",
    "Turn",
    "Unfit",
    "Unmade",
    "Unsound",
    "Usable",
    "Visit",
    "Voice",
    "Voices",
    "Wanted",
    "Wants",
    "Watched",
    "Way",
    "Weather",
    "What",
    "Why",
    "Wish",
    "Word",
    "Words",
    "World",
];

/// Words that no identifier contains, in tests as elsewhere: each was once a metaphor for a part of this program, or a
/// bare participle for a message or a request.
const IDENTIFIER_WORDS: &[&str] = &[
    "asked",
    "asks",
    "asking",
    "astray",
    "beside",
    "blown",
    "bell",
    "bells",
    "books",
    "chorus",
    "crank",
    "crew",
    "dice",
    "door",
    "doors",
    "errand",
    "everybody",
    "eye",
    "fate",
    "fortune",
    "graves",
    "heard",
    "hears",
    "hollow",
    "judge",
    "judged",
    "lasting",
    "lent",
    "maker",
    "manner",
    "passage",
    "patience",
    "poke",
    "poked",
    "pokes",
    "premises",
    "said",
    "settle",
    "settled",
    "shelf",
    "somebody",
    "stories",
    "storm",
    "story",
    "stranger",
    "strangers",
    "stray",
    "strays",
    "sung",
    "tally",
    "told",
    "traveller",
    "unfit",
    "voice",
    "voices",
    "weather",
    "wish",
    "wishes",
];

/// Phrases that are hard to understand, with the replacement.
const PHRASES: &[(&str, &str)] = &[
    ("nobody", "name the actor, or use the passive"),
    ("somebody", "name the actor: the user, the caller, another process"),
    ("everybody", "name the group"),
    ("whoever", "name the actor"),
    ("what became of", "the state of, the result of"),
    ("of its own", "its own, a separate"),
    ("of their own", "their own, separate"),
    ("of our own", "our own"),
    ("of one's own", "a private"),
    ("is told", "receives, is notified"),
    ("are told", "receive, are notified"),
    ("is heard of", "reports"),
    ("for ever", "forever, without limit"),
    ("anew", "again"),
    ("astray", "orphaned, misrouted"),
    ("in vain", "without success"),
    ("to be had", "available"),
    ("mend", "fix"),
    ("mended", "fixed"),
    ("say goodbye", "exit cleanly"),
    ("content with", "accepts"),
    ("hearsay", "report"),
];

/// Words with which a doc comment does not begin: it names the thing, or states what the function does.
const OPENINGS: &[&str] =
    &["What", "How", "Whether", "Who", "Whom", "Whose", "Why", "Where", "Which", "That", "So", "And", "But"];

pub(super) fn check(workspace: &Workspace) -> Result<Problems> {
    let mut problems = problems(&texts::product(workspace)?);
    let columns = columns(workspace)?;
    for path in workspace.files()?.into_iter().filter(|path| path.ends_with(".rs")) {
        problems.extend(identifier_problems(&path, &workspace.read(&path)?, &columns)?);
    }
    Ok(problems)
}

/// Returns every word of the migrations. A field that mirrors a column has the name of the column, which stays.
fn columns(workspace: &Workspace) -> Result<BTreeSet<String>> {
    let is_migration = |path: &String| path.starts_with("crates/db/migrations/");
    let mut columns = BTreeSet::new();
    for path in workspace.files()?.into_iter().filter(is_migration) {
        let text = workspace.read(&path)?;
        let statements = text.lines().filter(|line| !line.trim_start().starts_with("--"));
        let names =
            statements.flat_map(|line| line.split(|char: char| !char.is_alphanumeric() && char != '_'));
        columns.extend(names.filter(|name| name.contains('_')).map(str::to_owned));
    }
    Ok(columns)
}

fn identifier_problems(path: &str, source: &str, columns: &BTreeSet<String>) -> Result<Problems> {
    let mut problems = Vec::new();
    for (line, name) in texts::identifiers(path, source)? {
        let word = split_words(&name).into_iter().find(|word| IDENTIFIER_WORDS.contains(&word.as_str()));
        if let Some(word) = word.filter(|_| !columns.contains(&name)) {
            problems.push(format!(
                "{path}:{line}: `{name}` contains \"{word}\", which does not describe a thing"
            ));
        }
    }
    Ok(problems)
}

/// Splits `snake_case`, `CamelCase` and `UPPER_CASE` names into lower-case words.
fn split_words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for char in name.chars() {
        if char == '_' || (char.is_uppercase() && was_lower) {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| char != '_') {
            word.extend(char.to_lowercase());
        }
        was_lower = char.is_lowercase();
    }
    words
}

fn problems(texts: &[Text]) -> Problems {
    let mut problems = Vec::new();
    let mut before: Option<&Text> = None;
    for text in texts {
        let place = format!("{}:{}", text.path, text.line);
        if text.kind == Kind::Name {
            if NAMES.contains(&text.text.as_str()) {
                problems.push(format!("{place}: `{}` does not describe the thing", text.text));
            }
            continue;
        }
        for (phrase, instead) in PHRASES.iter().filter(|(phrase, _)| contains(&text.text, phrase)) {
            problems.push(format!("{place}: \"{phrase}\" in a {}; instead: {instead}", text.kind));
        }
        let continues = before.is_some_and(|before| {
            before.kind == text.kind && before.path == text.path && before.line + 1 == text.line
        });
        let opening = text.text.split_whitespace().next().unwrap_or_default();
        if text.kind == Kind::Doc && !continues && OPENINGS.contains(&opening) {
            problems.push(format!(
                "{place}: a doc comment that begins with \"{opening}\": begin with a noun or a verb"
            ));
        }
        before = Some(text);
    }
    problems
}

/// Returns whether the phrase occurs as whole words, ignoring case. A name in brackets or backticks is not a word: `nobody` is an account.
fn contains(text: &str, phrase: &str) -> bool {
    let text = text.to_lowercase();
    let joins = |char: Option<char>| char.is_some_and(|char| char.is_alphanumeric() || "_`[".contains(char));
    text.match_indices(phrase).any(|(at, found)| {
        let (before, after) =
            (text.get(..at).unwrap_or_default(), text.get(at + found.len()..).unwrap_or_default());
        !joins(before.chars().next_back()) && !joins(after.chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discouraged_words_in_identifiers_are_found_unless_they_name_a_column() {
        let source = "
            fn f(stop_asked_at: u64) { let told = 1; HollowHosts::STORY_MAX; }
            #[cfg(test)] mod tests { fn it_is_foretold() { let said = 2; } }
        ";
        let columns = BTreeSet::from(["stop_asked_at".to_owned()]);
        let found = identifier_problems("a.rs", source, &columns).unwrap();
        let names: Vec<&str> = found.iter().filter_map(|line| line.split('`').nth(1)).collect();
        assert_eq!(names, ["told", "HollowHosts", "STORY_MAX", "said"]);
    }

    #[test]
    fn discouraged_names_phrases_and_openings_are_found() {
        let source = "
            /// What somebody wants.
            struct Asked;
            /// A request, which
            /// somebodies may repeat.
            struct Request;
            fn f() { tracing::info!(\"nobody answers\"); bail!(\"somebody is there\"); }
        ";
        let found = problems(&texts::of_source("a.rs", source).unwrap());
        assert_eq!(
            found,
            [
                "a.rs:2: \"somebody\" in a doc; instead: name the actor: the user, the caller, another process",
                "a.rs:2: a doc comment that begins with \"What\": begin with a noun or a verb",
                "a.rs:3: `Asked` does not describe the thing",
                "a.rs:7: \"nobody\" in a log; instead: name the actor, or use the passive",
                "a.rs:7: \"somebody\" in a message; instead: name the actor: the user, the caller, another process",
            ]
        );
    }
}
