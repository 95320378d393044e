//! What dispatchers and executors do with containers.

use serde_json::{Map, Value};
use windlass_model::{
    container::Status,
    queue::{Call, Container, Refusal, Who, change},
    time::Timestamp,
};

use super::{
    Asker, Error, Result,
    auth::{self, Made},
    write::{Beside, again, alone, around, log_row, open_secrets, write},
};
use crate::{
    app::App,
    db::{Unit, queue_list::Sight},
};

/// A container and, for who just locked it, its executor's token.
#[derive(Debug)]
pub struct Taken {
    pub container: Container,
    pub executor: Option<Made>,
}

pub async fn lock(app: &App, asker: &Asker, uuid: &str) -> Result<Taken> {
    visible(asker, uuid)?;
    again(|| try_lock(app, asker, uuid)).await
}

/// As whom the caller acts on a container. An admin may lock one, as at Arvados, and is then its holder by the token that
/// they showed.
fn acting(asker: &Asker, container: &Container) -> Who {
    let holds = container.is_held() && container.locked_by_uuid.as_ref() == Some(&asker.token_uuid);
    if holds { asker.as_dispatcher() } else { asker.who.clone() }
}

async fn try_lock(app: &App, asker: &Asker, uuid: &str) -> Result<Option<Taken>> {
    let before = alone(app, uuid).await?;
    let container = one(&before.world.containers, uuid)?;
    let now = app.db().now().await?;
    let mut locked = match change::lock(&container, &asker.as_dispatcher(), "") {
        Ok(locked) => locked,
        Err(refusal) => return replayed(app, asker, container, "lock", refusal).await.map(Some),
    };
    let user = auth::user_named(app, &container.runtime_user_uuid).await?;
    let (inside, first) = auth::draw(app, "container", user, &locked, now)?;
    let (executor, second) = auth::draw(app, "executor", asker.user, &locked, now)?;
    locked.auth_uuid = Some(inside.uuid);
    locked.last_call = Some(call(asker, &format!("lock {}", executor.uuid)));
    let mut world = before.world.clone();
    world.containers.insert(uuid.to_owned(), locked);
    let beside = Beside { changes: vec![first, second], ..Beside::default() };
    let Some(world) = write(app, asker, &before, world, beside, now).await? else { return Ok(None) };
    Ok(Some(Taken { container: one(&world.containers, uuid)?, executor: Some(executor) }))
}

fn call(asker: &Asker, what: &str) -> Call {
    Call { token: asker.token_uuid.clone(), request: asker.request.clone(), what: what.to_owned() }
}

/// The answer that this very call got already, as long as nothing happened since; else the refusal.
async fn replayed(app: &App, asker: &Asker, container: Container, what: &str, no: Refusal) -> Result<Taken> {
    let Some(last) = &container.last_call else { return Err(no.into()) };
    let same = last.token == asker.token_uuid && last.request == asker.request && !asker.request.is_empty();
    let (kind, executor) = last.what.split_once(' ').unwrap_or((&last.what, ""));
    if !same || kind != what {
        return Err(no.into());
    }
    let executor = if executor.is_empty() { None } else { auth::executor(app, executor).await? };
    Ok(Taken { container, executor })
}

pub async fn unlock(
    app: &App,
    asker: &Asker,
    uuid: &str,
    attempt: Option<u64>,
    release: bool,
) -> Result<Container> {
    let rule = |container: &Container, now| {
        change::unlock(container, &acting(asker, container), attempt, release, now)
    };
    apply(app, asker, uuid, "unlock", &rule).await
}

pub async fn update(app: &App, asker: &Asker, uuid: &str, patch: &Map<String, Value>) -> Result<Container> {
    let what = patch.get("state").and_then(Value::as_str).unwrap_or("update").to_owned();
    let rule = |container: &Container, now| change::update(container, &acting(asker, container), patch, now);
    apply(app, asker, uuid, &what, &rule).await
}

type Rule<'a> = dyn Fn(&Container, Timestamp) -> Result<Container, Refusal> + Sync + 'a;

async fn apply(app: &App, asker: &Asker, uuid: &str, what: &str, rule: &Rule<'_>) -> Result<Container> {
    visible(asker, uuid)?;
    again(|| try_apply(app, asker, uuid, what, rule)).await
}

async fn try_apply(
    app: &App,
    asker: &Asker,
    uuid: &str,
    what: &str,
    rule: &Rule<'_>,
) -> Result<Option<Container>> {
    let now = app.db().now().await?;
    let mut before = alone(app, uuid).await?;
    let mut container = one(&before.world.containers, uuid)?;
    owns(asker, &container)?;
    let mut next = match rule(&container, now) {
        Ok(next) => next,
        Err(refusal) => {
            return replayed(app, asker, container, what, refusal).await.map(|taken| Some(taken.container));
        }
    };
    if next.is_final() || next.priority != container.priority {
        // Others wait for this: they change with it.
        before = around(app, &[uuid.to_owned()], &[]).await?;
        container = one(&before.world.containers, uuid)?;
        next = match rule(&container, now) {
            Ok(next) => next,
            // It changed between two looks.
            Err(_) => return Ok(None),
        };
    }
    if next.state != container.state {
        next.last_call = Some(call(asker, what));
    }
    let mut world = before.world.clone();
    world.containers.insert(uuid.to_owned(), next);
    let written = write(app, asker, &before, world, Beside::default(), now).await?;
    written.map(|world| one(&world.containers, uuid)).transpose()
}

fn one(all: &std::collections::BTreeMap<String, Container>, uuid: &str) -> Result<Container> {
    all.get(uuid).cloned().ok_or_else(|| Error::Missing(uuid.to_owned()))
}

/// An executor, and the program inside, change one container.
fn visible(asker: &Asker, uuid: &str) -> Result<()> {
    match asker.sight() {
        Sight::One(own) | Sight::Inside(own) if own != uuid => Err(Error::Missing(uuid.to_owned())),
        Sight::One(_) | Sight::Inside(_) | Sight::All | Sight::Owner(_) => Ok(()),
    }
}

fn owns(asker: &Asker, container: &Container) -> Result<()> {
    match asker.sight() {
        Sight::Owner(owner) if owner != container.owner_uuid => Err(Error::Missing(container.uuid.clone())),
        Sight::Owner(_) | Sight::All | Sight::One(_) | Sight::Inside(_) => Ok(()),
    }
}

/// Mounts that only the program inside may see; and who runs it, to put them there.
pub async fn secret_mounts(app: &App, asker: &Asker, uuid: &str) -> Result<Value> {
    let is_theirs = match &asker.who {
        Who::Inside { container, .. } | Who::Executor { container, .. } => container == uuid,
        Who::Admin | Who::User | Who::Dispatcher { .. } => false,
    };
    if !is_theirs {
        return Err(Error::denied("secret mounts are for the container itself"));
    }
    match open_secrets(app, uuid).await? {
        Some(text) => Ok(serde_json::from_str(&text)?),
        None => Ok(Value::Object(Map::new())),
    }
}

/// What somebody says about a container. A dispatcher that leaves it says why, and the container shows it.
pub async fn say(
    app: &App,
    asker: &Asker,
    uuid: &str,
    event: &str,
    properties: &Map<String, Value>,
) -> Result<String> {
    visible(asker, uuid)?;
    let before = alone(app, uuid).await?;
    let container = one(&before.world.containers, uuid)?;
    owns(asker, &container)?;
    let said = Value::Object(properties.clone());
    let (name, row) = log_row(app, uuid, &container.owner_uuid, event, &said)?;
    let text = |name: &str| properties.get(name).and_then(Value::as_str).unwrap_or_default();
    let leaves =
        text("event") == "decided_not_to_run" && matches!(asker.as_dispatcher(), Who::Dispatcher { .. });
    if event == "dispatch" && leaves && container.state == Status::Queued {
        let why = if text("reason").is_empty() { text("text") } else { text("reason") };
        let next = Container { scheduling_status: why.to_owned(), ..container.clone() };
        let mut world = before.world.clone();
        world.containers.insert(uuid.to_owned(), next);
        let now = app.db().now().await?;
        // Somebody who changes it meanwhile knows better why it waits.
        write(app, asker, &before, world, Beside::default(), now).await?;
    }
    app.db().write(Unit::new().and([row])).await?;
    app.queue_changed();
    Ok(name)
}
