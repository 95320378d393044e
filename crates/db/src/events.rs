//! Tables `events` and `event_targets`: append-only, written in the unit of the change that they describe.

use uuid::Uuid;
use windlass_model::{
    event::{Entity, Event},
    id::{ProjectId, UserId},
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Val,
    filter::{Filter, Page, contains_pattern},
};

/// An object that an event names, with its name at that time.
#[derive(Clone, Copy, Debug)]
pub struct EventTarget<'a> {
    pub entity: Entity,
    pub id: Uuid,
    pub name: &'a str,
}

/// Context of an event, besides its content.
#[derive(Clone, Copy, Debug)]
pub struct EventContext<'a> {
    pub project: Option<ProjectId>,
    pub user: Option<UserId>,
    /// Token of the lock under which it was written.
    pub lock_token: Option<Uuid>,
    pub targets: &'a [EventTarget<'a>],
}

/// Rows of one event, for the unit of the change that it describes.
pub fn append(db: &Db, event: &Event, place: &EventContext<'_>) -> Result<Vec<Change>, DbError> {
    let id = db.next_id()?;
    let mut changes = vec![Change::Insert {
        table: "events",
        values: vec![
            ("id", id.into()),
            ("entity", event.entity.as_str().into()),
            ("entity_id", event.id.into()),
            ("project_id", place.project.into()),
            ("kind", event.kind.as_str().into()),
            ("from_status", event.from.into()),
            ("to_status", event.to.into()),
            ("is_final", event.is_final.into()),
            ("reason", event.reason.as_str().into()),
            ("message", event.message.as_str().into()),
            ("actor", event.actor.as_str().into()),
            ("actor_user_id", place.user.into()),
            ("lock_token", place.lock_token.into()),
            ("epoch", event.epoch.and_then(|epoch| i64::try_from(epoch).ok()).into()),
            ("recorded_at", Val::Now),
        ],
    }];
    changes.extend(place.targets.iter().map(|target| Change::Insert {
        table: "event_targets",
        values: vec![
            ("event_id", id.into()),
            ("type", target.entity.as_str().into()),
            ("target_id", target.id.into()),
            ("name", target.name.into()),
            ("project_id", place.project.into()),
        ],
    }));
    Ok(changes)
}

/// An event as shown to users.
#[derive(Clone, Debug)]
pub struct EventView {
    pub id: Uuid,
    pub message: String,
    pub recorded_at: Timestamp,
    pub actor: Option<(Uuid, String, bool)>,
    pub targets: Vec<EventTargetView>,
    pub seq: i64,
    pub kind: String,
    pub entity: String,
    pub from: Option<String>,
    pub to: Option<String>,
    pub reason: Option<String>,
    pub is_final: bool,
    pub actor_name: Option<String>,
}

#[derive(Clone, Debug)]
pub struct EventTargetView {
    pub kind: String,
    pub id: Uuid,
    pub name: String,
    pub project: Option<(Uuid, String, bool)>,
}

/// Kind of the object that contains the targets.
#[derive(Clone, Copy, Debug)]
pub enum ParentKind {
    Project,
    Run,
    Fleet,
}

#[derive(Debug, Default)]
pub struct EventQuery<'a> {
    /// `None`: all events. Else events of this user's projects, and of the user.
    pub visible_to: Option<UserId>,
    pub targets: Option<&'a [Uuid]>,
    pub within: Option<(&'a [Uuid], Option<ParentKind>)>,
    pub types: Option<&'a [String]>,
    /// Users, and whether the system is among the actors.
    pub actors: Option<(Vec<Uuid>, bool)>,
    pub reasons: Option<&'a [String]>,
    pub kinds: Option<&'a [String]>,
    pub entities: Option<&'a [String]>,
    pub since: Option<Timestamp>,
    pub until: Option<Timestamp>,
    /// Part of the message.
    pub text: Option<&'a str>,
    pub page: Page,
}

/// Events in the order of recording.
pub async fn list(db: &Db, requested: &EventQuery<'_>) -> Result<Vec<EventView>, DbError> {
    let mut filter = Filter::new();
    if let Some(user) = requested.visible_to {
        filter.is(
            "(e.project_id IN (SELECT m.project_id FROM members m WHERE m.user_id = ?)
              OR (e.project_id IS NULL AND (e.actor_user_id = ? OR e.entity_id = ?)))",
            user,
        );
    }
    if let Some(ids) = requested.targets {
        filter.is(
            "EXISTS (SELECT 1 FROM event_targets t WHERE t.event_id = e.id
                     AND t.target_id IN (SELECT value FROM json_each(CAST(? AS TEXT))))",
            Val::list(ids),
        );
    }
    match requested.within {
        // The events of one project are read in the order of their index.
        Some(([one], Some(ParentKind::Project))) => filter.is("e.project_id = ?", *one),
        Some((ids, within)) => filter.is(parent_condition(within), Val::list(ids)),
        None => {}
    }
    if let Some(types) = requested.types {
        filter.is(
            "EXISTS (SELECT 1 FROM event_targets t WHERE t.event_id = e.id
                     AND t.type IN (SELECT value FROM json_each(CAST(? AS TEXT))))",
            Val::list(types),
        );
    }
    if let Some((users, system)) = &requested.actors {
        let or = if *system { " OR e.actor_user_id IS NULL" } else { "" };
        filter.is(
            &format!("(e.actor_user_id IN (SELECT value FROM json_each(CAST(? AS TEXT))){or})"),
            Val::list(users),
        );
    }
    let lists =
        [("e.reason", requested.reasons), ("e.kind", requested.kinds), ("e.entity", requested.entities)];
    for (column, list) in lists {
        if let Some(list) = list {
            filter.and_in(column, list);
        }
    }
    if let Some(since) = requested.since {
        filter.is("e.recorded_at >= ?", since);
    }
    if let Some(until) = requested.until {
        filter.is("e.recorded_at < ?", until);
    }
    if let Some(text) = requested.text {
        filter.is("lower(e.message) LIKE ? ESCAPE '!'", contains_pattern(text));
    }
    filter.after("e.recorded_at", "e.id", &requested.page);
    let (shown, params) = filter.done();
    let order = requested.page.order("e.recorded_at", "e.id");
    let sql = format!(
        "SELECT e.id, e.message, e.recorded_at, e.actor_user_id, u.name, u.deleted,
                e.seq, e.kind, e.entity, e.from_status, e.to_status, e.reason, e.is_final, e.actor
         FROM events e LEFT JOIN users u ON u.id = e.actor_user_id{shown}{order}"
    );
    let rows = db.query(sql, params).await?;
    let mut events = Vec::with_capacity(rows.len());
    for row in &rows {
        let actor = match (row.opt_uuid(3)?, row.opt_text(4)?) {
            (Some(id), Some(name)) => Some((id, name, row.bool(5)?)),
            _ => None,
        };
        events.push(EventView {
            id: row.uuid(0)?,
            message: row.text(1)?,
            recorded_at: Timestamp(row.int(2)?),
            actor,
            targets: Vec::new(),
            seq: row.int(6)?,
            kind: row.text(7)?,
            entity: row.text(8)?,
            from: row.opt_text(9)?,
            to: row.opt_text(10)?,
            reason: row.opt_text(11)?,
            is_final: row.bool(12)?,
            actor_name: row.opt_text(13)?,
        });
    }
    load_targets(db, &mut events).await?;
    Ok(events)
}

/// Loads the targets of all events with one query.
async fn load_targets(db: &Db, events: &mut [EventView]) -> Result<(), DbError> {
    let sql = "SELECT t.event_id, t.type, t.target_id, t.name, t.project_id, p.name, p.deleted
               FROM event_targets t LEFT JOIN projects p ON p.id = t.project_id
               WHERE t.event_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) ORDER BY t.type, t.name";
    let rows = db.query(sql, vec![Val::list(events.iter().map(|event| event.id))]).await?;
    let mut by_event = std::collections::HashMap::<Uuid, Vec<EventTargetView>>::new();
    for row in &rows {
        let project = match (row.opt_uuid(4)?, row.opt_text(5)?) {
            (Some(id), Some(name)) => Some((id, name, row.bool(6)?)),
            _ => None,
        };
        by_event.entry(row.uuid(0)?).or_default().push(EventTargetView {
            kind: row.text(1)?,
            id: row.uuid(2)?,
            name: row.text(3)?,
            project,
        });
    }
    for event in events {
        event.targets = by_event.remove(&event.id).unwrap_or_default();
    }
    Ok(())
}

fn parent_condition(within: Option<ParentKind>) -> &'static str {
    match within {
        Some(ParentKind::Project) => "e.project_id IN (SELECT value FROM json_each(CAST(? AS TEXT)))",
        Some(ParentKind::Run) => {
            "(e.entity_id IN (SELECT value FROM json_each(CAST(? AS TEXT)))
              OR e.entity_id IN (SELECT j.id FROM jobs j
                                 WHERE j.run_id IN (SELECT value FROM json_each(CAST(? AS TEXT)))))"
        }
        Some(ParentKind::Fleet) => {
            "(e.entity_id IN (SELECT value FROM json_each(CAST(? AS TEXT)))
              OR e.entity_id IN (SELECT i.id FROM instances i
                                 WHERE i.fleet_id IN (SELECT value FROM json_each(CAST(? AS TEXT)))))"
        }
        None => "e.entity_id IN (SELECT value FROM json_each(CAST(? AS TEXT)))",
    }
}
