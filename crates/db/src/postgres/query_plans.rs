//! Measures for good query plans of Postgres.
//!
//! A statement is planned once and the plan is kept until its tables are analysed. They may have been empty at the
//! time: then all plans seemed equally good, and some of them read thousands of rows instead of one a minute later.

use std::{borrow::Cow, time::Duration};

use tokio::{sync::broadcast, time::sleep};

use super::session::SharedSession;
use crate::DbError;

/// List expression of the portable statements, before and after the parameter.
const LIST_START: &str = "IN (SELECT value FROM json_each(CAST($";
const LIST_END: &str = " AS TEXT)))";

/// Replaces lists with arrays, whose elements are looked up in an index one by one. The original expression would be
/// joined, based on a guess of its size.
pub(super) fn lists_as_arrays(sql: &str) -> Cow<'_, str> {
    let mut plain = sql;
    let mut better = String::new();
    while let Some(at) = plain.find(LIST_START) {
        let (before, list) = plain.split_at(at);
        let Some(end) = list.find(LIST_END) else { break };
        let inner = &list["IN (".len()..end + LIST_END.len() - 1];
        better.push_str(before);
        if before.ends_with("NOT ") {
            better.push_str(&list[..end + LIST_END.len()]);
        } else {
            better.push_str(&format!("= ANY (ARRAY({inner}))"));
        }
        plain = &list[end + LIST_END.len()..];
    }
    if better.is_empty() {
        return Cow::Borrowed(sql);
    }
    Cow::Owned(better + plain)
}

/// Interval between two checks of the sizes of tables. Postgres itself checks once a minute.
const ANALYZE_INTERVAL: Duration = Duration::from_secs(2);
/// Tables that are twice as large as their statistics. For small ones no plan is bad.
const GROWN_TABLES: &str = "SELECT c.relname::TEXT FROM pg_stat_user_tables s JOIN pg_class c ON c.oid = s.relid \
                        WHERE s.schemaname = current_schema() AND s.n_live_tup > 2 * greatest(c.reltuples, 200)";

/// Analyses tables that have grown much, until it is stopped.
pub(super) async fn analyze_loop(link: SharedSession, mut stop: broadcast::Receiver<()>) {
    loop {
        tokio::select! {
            () = sleep(ANALYZE_INTERVAL) => {}
            _ = stop.recv() => return,
        }
        if let Err(error) = analyze_grown(&link).await {
            tracing::debug!(%error, "failed to analyse grown tables");
        }
    }
}

async fn analyze_grown(link: &SharedSession) -> Result<(), DbError> {
    for row in link.query("read the sizes of tables", GROWN_TABLES, &[]).await? {
        let table = row.text(0)?;
        let sql = format!("ANALYZE \"{}\"", table.replace('"', "\"\""));
        let session = link.session("analyse a table").await?;
        session
            .client
            .batch_execute(&sql)
            .await
            .map_err(|error| super::fault::classify("analyse", &sql, error))?;
        tracing::debug!(table, "analysed grown table");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::lists_as_arrays;

    #[test]
    fn list_subqueries_become_arrays_at_any_position() {
        let sql = "SELECT 1 FROM t WHERE a IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND b = $2 \
                   AND c IN (SELECT value FROM json_each(CAST($13 AS TEXT))) ORDER BY a";
        let want = "SELECT 1 FROM t WHERE a = ANY (ARRAY(SELECT value FROM json_each(CAST($1 AS TEXT)))) AND b = $2 \
                    AND c = ANY (ARRAY(SELECT value FROM json_each(CAST($13 AS TEXT)))) ORDER BY a";
        assert_eq!(lists_as_arrays(sql), want);
    }

    #[test]
    fn sql_without_list_subqueries_is_unchanged() {
        for sql in [
            "SELECT 1",
            "SELECT 1 WHERE a IN (SELECT id FROM t)",
            "SELECT 1 WHERE a NOT IN (SELECT value FROM json_each(CAST($1 AS TEXT))) AND b",
            "SELECT value FROM json_each(CAST($1 AS TEXT))",
        ] {
            assert_eq!(lists_as_arrays(sql), sql);
        }
    }
}
