//! Usage of projects, users and classes over time.

use std::collections::{BTreeMap, BTreeSet};

use windlass_api::usage::{self as wire, UsageGrouping, UsageRow};
use windlass_model::{
    id::{ProjectId, UserId},
    plan::budget::{BudgetPeriod, day_of, start_of},
};

use crate::{
    app::App,
    auth::Caller,
    db::{
        projects,
        usage::{self as rows, UsageDay},
    },
    error::{Error, Result},
};

/// Days of a report without a beginning.
const DAYS_DEFAULT: i64 = 30;
const DAYS_MAX: i64 = 3_700;
const HOUR_MS: f64 = 3_600_000.0;
const MICRODOLLARS: f64 = 1e6;

/// Fields of a group; those that were not requested are `None`.
type GroupKey = (Option<i64>, Option<ProjectId>, Option<UserId>, Option<String>);

pub(crate) async fn list(
    app: &App,
    caller: &Caller,
    requested: &wire::ListRequest,
) -> Result<wire::UsageReport> {
    let visible = projects::visible(app.db(), caller.user.id, caller.user.admin).await?;
    let names: BTreeMap<ProjectId, String> = visible.into_iter().map(|(id, name, _)| (id, name)).collect();
    for name in &requested.projects {
        if !names.values().any(|known| known == name) {
            return Err(Error::absent("Project"));
        }
    }
    let is_requested = |name: &String| requested.projects.is_empty() || requested.projects.contains(name);
    let ids: Vec<ProjectId> =
        names.iter().filter(|(_, name)| is_requested(name)).map(|(id, _)| *id).collect();
    let period = period(&requested.by)?;
    let now = app.db().now().await?;
    let last = day_of(requested.until.unwrap_or(now).min(now));
    let first = requested.since.map_or(last - DAYS_DEFAULT + 1, day_of);
    if first > last {
        return Err(Error::field("since", "must be before `until`, and not in the future"));
    }
    if last - first >= DAYS_MAX {
        return Err(Error::field("since", format!("must be at most {DAYS_MAX} days before `until`")));
    }
    let days = rows::days(app.db(), &ids, (first, last), now).await?;
    let users: BTreeSet<UserId> = days.iter().map(|day| day.user_id).collect();
    let users = rows::user_names(app.db(), &users.into_iter().collect::<Vec<_>>()).await?;
    let has = |what| requested.by.contains(&what);
    let mut groups: BTreeMap<GroupKey, UsageRow> = BTreeMap::new();
    let mut total = UsageRow::default();
    for day in &days {
        let key = (
            period.map(|period| period.first_day(day.day)),
            has(UsageGrouping::Project).then_some(day.project_id),
            has(UsageGrouping::User).then_some(day.user_id),
            has(UsageGrouping::Class).then(|| day.class.clone()),
        );
        let row = groups.entry(key).or_insert_with_key(|(from, project, user, class)| UsageRow {
            from: from.map(start_of),
            project: project.and_then(|project| names.get(&project).cloned()),
            user: user.and_then(|user| users.get(&user).cloned()),
            class: class.clone(),
            ..UsageRow::default()
        });
        add(row, day);
        add(&mut total, day);
    }
    let mut rows: Vec<UsageRow> = groups.into_values().collect();
    // By time, then the most expensive first.
    rows.sort_by(|one, other| {
        let use_of = |row: &UsageRow| (row.cost, row.gpu_hours, row.cpu_hours);
        let names = |row: &UsageRow| (row.project.clone(), row.user.clone(), row.class.clone());
        let by_use = use_of(other).partial_cmp(&use_of(one)).unwrap_or(std::cmp::Ordering::Equal);
        one.from.cmp(&other.from).then(by_use).then_with(|| names(one).cmp(&names(other)))
    });
    Ok(wire::UsageReport { since: start_of(first), until: start_of(last + 1).min(now), rows, total })
}

/// Step of time by which rows are grouped, if any.
fn period(by: &[UsageGrouping]) -> Result<Option<BudgetPeriod>> {
    let mut found = by.iter().filter_map(|grouping| match grouping {
        UsageGrouping::Day => Some(BudgetPeriod::Day),
        UsageGrouping::Week => Some(BudgetPeriod::Week),
        UsageGrouping::Month => Some(BudgetPeriod::Month),
        UsageGrouping::Project | UsageGrouping::User | UsageGrouping::Class => None,
    });
    let period = found.next();
    if found.any(|other| Some(other) != period) {
        return Err(Error::field("by", "may contain only one of `day`, `week` and `month`"));
    }
    Ok(period)
}

fn add(row: &mut UsageRow, day: &UsageDay) {
    row.jobs += day.jobs;
    row.gpu_hours += day.gpu_ms as f64 / HOUR_MS;
    row.cpu_hours += day.cpu_ms as f64 / HOUR_MS;
    row.cost += day.cost as f64 / MICRODOLLARS;
}
