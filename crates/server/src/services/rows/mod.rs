//! Slim rows of lists: filtered, sorted, counted and paged.
//!
//! Runs are filtered by the database, because there are many. The other kinds are read as a whole, up to a limit, and
//! filtered here by the same rules as the web UI filters changes.

mod containers;
mod instances;
mod managed_jobs;
mod resource_words;
mod runs;

use std::{cmp::Ordering, collections::BTreeMap};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use windlass_api::rows::{Rows, RowsRequest};
use windlass_model::{id::ProjectId, time::Timestamp};

pub(crate) use self::{
    containers::{find as find_containers, list as containers},
    instances::{find as find_instance, installed_gpus, list as instances},
    managed_jobs::{find as find_managed_job, list as managed_jobs},
    resource_words::requested_resources,
    runs::{find as find_runs, list as runs},
};
use crate::{
    app::App,
    auth::Caller,
    db::projects,
    error::{Error, Result},
};

const LIMIT_MAX: u32 = 500;
const LIMIT_DEFAULT: u32 = 100;
/// Totals are exact up to this number.
const TOTAL_MAX: i64 = 10_000;
const LIST_ITEMS_MAX: usize = 1000;

/// Page of a request.
#[derive(Clone, Copy, Debug)]
struct RequestedPage {
    offset: u32,
    limit: u32,
}

impl RequestedPage {
    fn of(requested: &RowsRequest) -> Result<Self> {
        let limit = requested.limit.unwrap_or(LIMIT_DEFAULT);
        if limit > LIMIT_MAX {
            return Err(Error::field("limit", format!("must be from 0 to {LIMIT_MAX}")));
        }
        let lists =
            [&requested.projects, &requested.users, &requested.statuses, &requested.types, &requested.fleets];
        if lists.iter().any(|list| list.len() > LIST_ITEMS_MAX) {
            return Err(Error::field("statuses", format!("a list may have at most {LIST_ITEMS_MAX} items")));
        }
        let offset = match &requested.cursor {
            None => 0,
            Some(cursor) => decode_cursor(cursor)
                .ok_or_else(|| Error::field("cursor", "must be `next` or `prev` of a response"))?,
        };
        Ok(Self { offset, limit })
    }

    /// Cursors of the pages after and before a page of `count` rows out of `total`.
    fn cursors(self, total: i64) -> (Option<String>, Option<String>) {
        let end = self.offset.saturating_add(self.limit);
        let next = (self.limit > 0 && i64::from(end) < total).then(|| encode_cursor(end));
        let prev = (self.offset > 0).then(|| encode_cursor(self.offset.saturating_sub(self.limit)));
        (next, prev)
    }
}

fn encode_cursor(offset: u32) -> String {
    URL_SAFE_NO_PAD.encode(offset.to_string())
}

fn decode_cursor(cursor: &str) -> Option<u32> {
    String::from_utf8(URL_SAFE_NO_PAD.decode(cursor).ok()?).ok()?.parse().ok()
}

/// Column and direction of `sort`, if the column is one of these.
fn parse_sort<T: Copy>(sort: Option<&str>, columns: &[(&str, T)]) -> Result<Option<(T, bool)>> {
    let Some(sort) = sort else { return Ok(None) };
    let (name, descending) = sort.strip_prefix('-').map_or((sort, false), |name| (name, true));
    match columns.iter().find(|(known, _)| *known == name) {
        Some((_, column)) => Ok(Some((*column, descending))),
        None => {
            let known: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
            Err(Error::field("sort", format!("must be one of {}", known.join(", "))))
        }
    }
}

/// Requested projects that the caller may see. `None`: all projects.
async fn visible_projects(app: &App, caller: &Caller, names: &[String]) -> Result<Option<Vec<ProjectId>>> {
    if caller.user.admin && names.is_empty() {
        return Ok(None);
    }
    let visible = projects::visible(app.db(), caller.user.id, caller.user.admin).await?;
    let is_requested = |name: &String| names.is_empty() || names.contains(name);
    Ok(Some(visible.into_iter().filter(|(_, name, _)| is_requested(name)).map(|(id, ..)| id).collect()))
}

/// Fields of a row on which filters depend.
struct FilterFields<'a> {
    status: &'a str,
    user: Option<&'a str>,
    kind: Option<&'a str>,
    fleet: Option<&'a str>,
    at: Timestamp,
    /// Fields in which text is searched.
    texts: [Option<&'a str>; 4],
    id: String,
}

impl FilterFields<'_> {
    /// Returns whether a row matches, regardless of its status.
    fn matches(&self, requested: &RowsRequest) -> bool {
        let is_listed = |list: &[String], value: Option<&str>| {
            list.is_empty() || value.is_some_and(|value| list.iter().any(|one| one == value))
        };
        let has_text = |text: &String| {
            let text = text.to_lowercase();
            self.texts.iter().flatten().any(|field| field.to_lowercase().contains(&text))
                || self.id.starts_with(&text)
        };
        is_listed(&requested.users, self.user)
            && is_listed(&requested.types, self.kind)
            && is_listed(&requested.fleets, self.fleet)
            && requested.since.is_none_or(|since| self.at >= since)
            && requested.until.is_none_or(|until| self.at < until)
            && requested.text.as_ref().is_none_or(has_text)
    }
}

/// Filters, sorts, counts and cuts rows that were read as a whole. `has_more`: there are rows that were not read.
fn page_of<T>(
    all: Vec<T>,
    requested: &RowsRequest,
    page: RequestedPage,
    fields: impl Fn(&T) -> FilterFields<'_>,
    order: impl Fn(&T, &T) -> Ordering,
    (has_more, as_of): (bool, Timestamp),
) -> Rows<T> {
    let mut found: Vec<T> = all.into_iter().filter(|row| fields(row).matches(requested)).collect();
    let mut counts = BTreeMap::new();
    for row in &found {
        *counts.entry(fields(row).status.to_owned()).or_insert(0) += 1;
    }
    if !requested.statuses.is_empty() {
        found.retain(|row| requested.statuses.iter().any(|status| status == fields(row).status));
    }
    found.sort_by(|one, other| order(one, other).then_with(|| fields(one).id.cmp(&fields(other).id)));
    let total = i64::try_from(found.len()).unwrap_or(i64::MAX);
    let (next, prev) = page.cursors(total);
    let rows = found.into_iter().skip(page.offset as usize).take(page.limit as usize).collect();
    Rows {
        rows,
        next,
        prev,
        counts,
        total: total.min(TOTAL_MAX),
        more: has_more || total > TOTAL_MAX,
        as_of: as_of.0,
    }
}

fn directed(descending: bool, order: Ordering) -> Ordering {
    if descending { order.reverse() } else { order }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_by_their_cursors() {
        let requested = RowsRequest { limit: Some(2), ..RowsRequest::default() };
        let page = RequestedPage::of(&requested).unwrap();
        let (next, prev) = page.cursors(5);
        assert!(prev.is_none());
        let second = RequestedPage::of(&RowsRequest { cursor: next, ..requested.clone() }).unwrap();
        assert_eq!((second.offset, second.cursors(5).1.as_deref()), (2, Some("MA")));
        assert!(second.cursors(4).0.is_none(), "it is the last page");
        for cursor in ["", "x", "LTE"] {
            let wrong = RowsRequest { cursor: Some(cursor.into()), ..requested.clone() };
            assert!(RequestedPage::of(&wrong).is_err(), "{cursor}");
        }
        assert!(RequestedPage::of(&RowsRequest { limit: Some(501), ..requested }).is_err());
    }

    #[test]
    fn rows_match_by_lists_time_and_text() {
        let fields = || FilterFields {
            status: "idle",
            user: Some("ada"),
            kind: Some("local"),
            fleet: None,
            at: Timestamp::from_secs(100),
            texts: [Some("GPU-7"), Some("host is silent"), None, None],
            id: "3f9a".into(),
        };
        let with = |change: fn(&mut RowsRequest)| {
            let mut requested = RowsRequest::default();
            change(&mut requested);
            fields().matches(&requested)
        };
        assert!(with(|_| ()));
        assert!(with(|requested| requested.users = vec!["bob".into(), "ada".into()]));
        assert!(!with(|requested| requested.users = vec!["bob".into()]));
        assert!(!with(|requested| requested.fleets = vec!["gpu".into()]), "it is in no fleet");
        assert!(with(|requested| requested.text = Some("gpu".into())));
        assert!(with(|requested| requested.text = Some("Silent".into())));
        assert!(with(|requested| requested.text = Some("3f9".into())));
        assert!(!with(|requested| requested.text = Some("9a".into())), "an id matches from its beginning");
        assert!(with(|requested| requested.since = Some(Timestamp::from_secs(100))));
        assert!(!with(|requested| requested.until = Some(Timestamp::from_secs(100))));
    }

    #[test]
    fn unknown_columns_cannot_be_sorted_by() {
        let columns = [("name", 1), ("cost", 2)];
        assert_eq!(parse_sort(Some("-cost"), &columns).unwrap(), Some((2, true)));
        assert_eq!(parse_sort(None, &columns).unwrap(), None);
        assert!(parse_sort(Some("id; DROP TABLE runs"), &columns).is_err());
    }
}
