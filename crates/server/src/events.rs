//! Events that the API records: a user did something, described by a message.

use uuid::Uuid;
use windlass_model::{
    event::{Actor, Entity, Event, EventCause},
    id::{ProjectId, UserId},
};

use crate::db::{
    Change, Db, DbError,
    events::{EventContext, EventTarget, append},
};

/// Actor of an event: a user, or the server itself.
pub fn actor(user: Option<UserId>) -> Actor {
    user.map_or(Actor::Server, Actor::User)
}

/// Subject of an event.
#[derive(Clone, Copy, Debug)]
pub struct EventSubject<'a> {
    pub entity: Entity,
    pub id: Uuid,
    pub name: &'a str,
    pub project: Option<ProjectId>,
}

/// Records an event that changes no status.
pub fn note(
    db: &Db,
    by: Option<UserId>,
    about: &EventSubject<'_>,
    reason: &str,
    message: String,
) -> Result<Vec<Change>, DbError> {
    let because = EventCause { actor: actor(by), reason: reason.to_owned(), message };
    record(db, by, about, &Event::note(about.entity, about.id, because))
}

/// Records any event, with the subject as its only target.
pub fn record(
    db: &Db,
    by: Option<UserId>,
    about: &EventSubject<'_>,
    event: &Event,
) -> Result<Vec<Change>, DbError> {
    let target = EventTarget { entity: about.entity, id: about.id, name: about.name };
    append(
        db,
        event,
        &EventContext { project: about.project, user: by, lock_token: None, targets: &[target] },
    )
}
