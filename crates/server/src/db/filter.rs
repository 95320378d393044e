//! Conditions that a request may or may not set, gathered into one WHERE with its parameters.

use uuid::Uuid;
use windlass_model::time::Timestamp;

use super::value::Val;

/// A WHERE clause in the making. Texts are ours alone; values of users are always parameters.
#[derive(Debug, Default)]
pub(super) struct Filter {
    conditions: Vec<String>,
    params: Vec<Val>,
}

impl Filter {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// A condition without parameters.
    pub(super) fn and(&mut self, condition: &str) {
        self.conditions.push(condition.to_owned());
    }

    /// A condition in which each `?` is the value.
    pub(super) fn is(&mut self, condition: &str, value: impl Into<Val>) {
        let place = self.bind(value);
        self.conditions.push(condition.replace('?', &place));
    }

    /// `column` is one of these; an empty list finds nothing.
    pub(super) fn and_in<T: ToString>(&mut self, column: &str, items: &[T]) {
        let list = Val::list(items.iter().map(T::to_string));
        self.is(&format!("{column} IN (SELECT value FROM json_each(CAST(? AS TEXT)))"), list);
    }

    /// A parameter; the answer is its place, `$n`.
    pub(super) fn bind(&mut self, value: impl Into<Val>) -> String {
        self.params.push(value.into());
        format!("${}", self.params.len())
    }

    /// The rows after one in the order of the page.
    pub(super) fn after(&mut self, time: &str, id: &str, seen: &Page) {
        let Some(at) = seen.time else { return };
        let (at, before) = (self.bind(at.0), if seen.ascending { '>' } else { '<' });
        let next = if seen.ids_ascend() { '>' } else { '<' };
        // The first half is what an index can seek to; the second only cuts the ties.
        match seen.id {
            Some(seen) => {
                let seen = self.bind(seen);
                self.conditions
                    .push(format!("{time} {before}= {at} AND ({time} {before} {at} OR {id} {next} {seen})"));
            }
            None => self.conditions.push(format!("{time} {before} {at}")),
        }
    }

    /// ` WHERE …` (or nothing), the parameters, and how many there are.
    pub(super) fn done(self) -> (String, Vec<Val>) {
        if self.conditions.is_empty() {
            return (String::new(), self.params);
        }
        (format!(" WHERE {}", self.conditions.join(" AND ")), self.params)
    }
}

/// Where a page begins and how long it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Page {
    pub time: Option<Timestamp>,
    pub id: Option<Uuid>,
    pub limit: i64,
    pub ascending: bool,
    pub ties: TieOrder,
}

/// How rows of the same time are ordered, by their ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TieOrder {
    /// Whatever the direction of time, as clients know it.
    #[default]
    Ascending,
    /// As the times are: one direction is the other one backwards.
    FollowTime,
}

impl Page {
    fn ids_ascend(&self) -> bool {
        self.ascending || self.ties == TieOrder::Ascending
    }

    pub(super) fn order(&self, time: &str, id: &str) -> String {
        let word = |ascends: bool| if ascends { "ASC" } else { "DESC" };
        let (times, ids) = (word(self.ascending), word(self.ids_ascend()));
        format!(" ORDER BY {time} {times}, {id} {ids} LIMIT {}", self.limit.max(0))
    }
}

/// A LIKE pattern that finds the text anywhere, taking none of it as a wildcard; for `ESCAPE '!'`.
pub(super) fn contains_pattern(text: &str) -> String {
    let mut pattern = String::from("%");
    for letter in text.to_lowercase().chars() {
        if matches!(letter, '%' | '_' | '!') {
            pattern.push('!');
        }
        pattern.push(letter);
    }
    pattern.push('%');
    pattern
}
