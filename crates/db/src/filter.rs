//! Optional conditions of a request, combined into one WHERE with its parameters.

use uuid::Uuid;
use windlass_model::time::Timestamp;

use super::value::Val;

/// Builder of a WHERE clause. Texts are constants of the code; values from users are always parameters.
#[derive(Debug, Default)]
pub(super) struct Filter {
    conditions: Vec<String>,
    params: Vec<Val>,
}

impl Filter {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Adds a condition without parameters.
    pub(super) fn and(&mut self, condition: &str) {
        self.conditions.push(condition.to_owned());
    }

    /// Adds a condition in which each `?` is the value.
    pub(super) fn is(&mut self, condition: &str, value: impl Into<Val>) {
        let place = self.bind(value);
        self.conditions.push(condition.replace('?', &place));
    }

    /// Requires that `column` is one of these; an empty list matches nothing.
    pub(super) fn and_in<T: ToString>(&mut self, column: &str, items: &[T]) {
        let list = Val::list(items.iter().map(T::to_string));
        self.is(&format!("{column} IN (SELECT value FROM json_each(CAST(? AS TEXT)))"), list);
    }

    /// Adds a parameter; returns its placeholder, `$n`.
    pub(super) fn bind(&mut self, value: impl Into<Val>) -> String {
        self.params.push(value.into());
        format!("${}", self.params.len())
    }

    /// Requires rows after the given one in the order of the page.
    pub(super) fn after(&mut self, time: &str, id: &str, seen: &Page) {
        let Some(at) = seen.time else { return };
        let (at, before) = (self.bind(at.0), if seen.ascending { '>' } else { '<' });
        let next = if seen.ids_ascend() { '>' } else { '<' };
        // An index can seek to the first half; the second only resolves ties.
        match seen.id {
            Some(seen) => {
                let seen = self.bind(seen);
                self.conditions
                    .push(format!("{time} {before}= {at} AND ({time} {before} {at} OR {id} {next} {seen})"));
            }
            None => self.conditions.push(format!("{time} {before} {at}")),
        }
    }

    /// Returns ` WHERE …` (or nothing) and the parameters.
    pub(super) fn done(self) -> (String, Vec<Val>) {
        if self.conditions.is_empty() {
            return (String::new(), self.params);
        }
        (format!(" WHERE {}", self.conditions.join(" AND ")), self.params)
    }
}

/// Start and length of a page.
#[derive(Clone, Copy, Debug, Default)]
pub struct Page {
    pub time: Option<Timestamp>,
    pub id: Option<Uuid>,
    pub limit: i64,
    pub ascending: bool,
    pub ties: TieOrder,
}

/// Order of rows with the same time, by their ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TieOrder {
    /// Regardless of the direction of time, as clients expect it.
    #[default]
    Ascending,
    /// In the direction of the times: one direction is the reverse of the other.
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

/// LIKE pattern that finds the text anywhere, with wildcards escaped; for `ESCAPE '!'`.
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
