//! Table `budgets`, and what is spent of them.

use uuid::Uuid;
use windlass_model::{
    id::{ProjectId, UserId},
    plan::budget::{Budget, BudgetPeriod, BudgetUnit, day_of, start_of},
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Expect, Row, Val,
    record::statements,
    usage::{self, UsageDay},
};
use crate::params;

statements! {
    LIST = "SELECT b.project_id, b.user_id, b.unit, b.period, b.warn_amount, b.cap_amount, b.id, b.noted_day, b.noted_level, \
            u.name, p.name FROM budgets b JOIN projects p ON p.id = b.project_id LEFT JOIN users u ON u.id = b.user_id \
            WHERE b.project_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) ORDER BY p.name, u.name IS NOT NULL, u.name, b.unit, b.period, b.id";
    PROJECTS = "SELECT DISTINCT b.project_id FROM budgets b JOIN projects p ON p.id = b.project_id WHERE NOT p.deleted";
    SET = "INSERT INTO budgets (id, project_id, user_id, unit, period, warn_amount, cap_amount, created_at) \
           VALUES ($1, $2, $3, $4, $5, $6, $7, now_us()) ON CONFLICT (project_id, coalesce(user_id, ''), unit, period) \
           DO UPDATE SET warn_amount = excluded.warn_amount, cap_amount = excluded.cap_amount, noted_level = 0";
    DELETE = "DELETE FROM budgets WHERE project_id = $1 AND coalesce(user_id, '') = coalesce(CAST($2 AS TEXT), '') \
              AND unit = $3 AND period = $4";
    /// Once for each period and level, whichever server is first.
    RECORD_LEVEL = "UPDATE budgets SET noted_day = $2, noted_level = $3 WHERE id = $1 AND (noted_day <> $2 OR noted_level < $3)";
}

/// A budget with the names that its events and lists show.
#[derive(Clone, Debug)]
pub struct NamedBudget {
    pub id: Uuid,
    pub budget: Budget,
    pub member_name: Option<String>,
    pub project_name: String,
    /// First day of the period.
    pub first_day: i64,
    /// Level for which an event was recorded in this period: 0 for none, 1 for the warning, 2 for the cap.
    pub noted_level: i64,
}

/// Budgets of these projects with what is spent.
pub async fn list(db: &Db, projects: &[ProjectId], now: Timestamp) -> Result<Vec<NamedBudget>, DbError> {
    if projects.is_empty() {
        return Ok(Vec::new());
    }
    let rows = db.query(LIST.as_str(), vec![Val::list(projects)]).await?;
    // A unit or period that this version does not know limits nothing.
    let mut found: Vec<NamedBudget> = Vec::new();
    for row in &rows {
        found.extend(read(row, now)?);
    }
    let Some(first) = found.iter().map(|one| one.first_day).min() else { return Ok(found) };
    let days = usage::days(db, projects, (first, day_of(now)), now).await?;
    for one in &mut found {
        one.budget.spent = spent(one, &days);
    }
    Ok(found)
}

fn read(row: &Row, now: Timestamp) -> Result<Option<NamedBudget>, DbError> {
    let (unit, period) = (row.str(2)?.parse::<BudgetUnit>(), row.str(3)?.parse::<BudgetPeriod>());
    let (Ok(unit), Ok(period)) = (unit, period) else { return Ok(None) };
    let amount = |amount: i64| u64::try_from(amount).unwrap_or_default();
    let (first_day, next) = (period.first_day(day_of(now)), period.next_first_day(day_of(now)));
    let budget = Budget {
        project: row.id(0)?,
        member: row.opt_uuid(1)?.map(UserId),
        unit,
        period,
        warn: row.opt_int(4)?.map(amount),
        cap: row.opt_int(5)?.map(amount),
        spent: 0,
        ends_at: start_of(next),
    };
    let is_noted = row.int(7)? == first_day;
    Ok(Some(NamedBudget {
        id: row.uuid(6)?,
        budget,
        member_name: row.opt_text(9)?,
        project_name: row.text(10)?,
        first_day,
        noted_level: if is_noted { row.int(8)? } else { 0 },
    }))
}

fn spent(one: &NamedBudget, days: &[UsageDay]) -> u64 {
    let Budget { project, unit, .. } = one.budget;
    let counts = |day: &&UsageDay| {
        day.day >= one.first_day && day.project_id == project && one.budget.applies_to(project, day.user_id)
    };
    let amount = |day: &UsageDay| match unit {
        BudgetUnit::Cost => day.cost,
        BudgetUnit::GpuHours => day.gpu_ms,
    };
    let sum: i64 = days.iter().filter(counts).map(amount).sum();
    u64::try_from(sum).unwrap_or_default()
}

/// Projects that have budgets.
pub async fn projects(db: &Db) -> Result<Vec<ProjectId>, DbError> {
    db.query(PROJECTS.as_str(), Vec::new()).await?.iter().map(|row| row.id(0)).collect()
}

/// Adds or replaces a budget.
pub fn set(id: Uuid, budget: &Budget) -> Change {
    let amount = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
    let (warn, cap) = (budget.warn.map(amount), budget.cap.map(amount));
    let (unit, period) = (budget.unit.as_str(), budget.period.as_str());
    let params = params![id, budget.project, budget.member, unit, period, warn, cap];
    Change::Exec { sql: SET.as_str().into(), params, expect: Expect::Any }
}

/// Stale if there is no such budget.
pub fn delete(project: ProjectId, member: Option<UserId>, unit: BudgetUnit, period: BudgetPeriod) -> Change {
    let params = params![project, member, unit.as_str(), period.as_str()];
    Change::Exec { sql: DELETE.as_str().into(), params, expect: Expect::One }
}

/// Stale if an event for this level was recorded in this period already.
pub fn record_level(id: Uuid, first_day: i64, level: i64) -> Change {
    let params = params![id, first_day, level];
    Change::Exec { sql: RECORD_LEVEL.as_str().into(), params, expect: Expect::One }
}
