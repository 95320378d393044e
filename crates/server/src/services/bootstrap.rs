//! First start: creates an admin, a project and a token. Every later start finds them and changes nothing.

use serde_json::json;
use windlass_api::error::ApiErrorCode;
use windlass_backend::local;
use windlass_model::{
    config::Configuration,
    event::{Entity, Event, EventCause},
    fleet,
    id::{FleetId, UserId},
};

use super::{grants, project_keys, projects, runs::problems_error, users};
use crate::{
    app::App,
    auth::Token,
    db::{
        Unit, exports,
        fleets::{self, NewFleet},
        tokens, users as user_rows,
    },
    error::{Error, Result},
    events::{EventSubject, actor, record},
};

const ADMIN: &str = "admin";
const PROJECT: &str = "main";
/// Fleet of the machine on which the server runs.
const FLEET: &str = "local";

/// Number of times that another replica, starting at the same time, may be faster.
const ATTEMPTS_MAX: usize = 5;

/// Returns the admin's token if this start created it: shown once.
pub async fn ensure(app: &App) -> Result<Option<Token>> {
    for _ in 1..ATTEMPTS_MAX {
        match try_ensure(app).await {
            Err(Error::Refused { code: ApiErrorCode::ResourceExists, .. }) => {}
            done => return done,
        }
    }
    try_ensure(app).await
}

async fn try_ensure(app: &App) -> Result<Option<Token>> {
    let chosen = app.settings().admin_token.as_deref().map(Token::chosen);
    let given = chosen.is_some();
    let admin = user_rows::by_name(app.db(), ADMIN).await?;
    let (id, fresh) = match admin {
        Some(admin) => (admin.id, ensure_token(app, admin.id, chosen).await?),
        None => {
            let (id, token) = users::add(app, None, ADMIN, true, None, true, chosen).await?;
            (id, Some(token))
        }
    };
    if crate::db::projects::find(app.db(), PROJECT, id).await?.is_none() {
        projects::add_first(app, id, PROJECT).await?;
    }
    project_keys::ensure(app).await?;
    if app.settings().local {
        add_local_fleet(app, id).await?;
    }
    grants::grant_configured(app, id).await?;
    // A token that the operator chose is already known to the operator.
    Ok(fresh.filter(|_| !given))
}

/// Creates a fleet with this machine, so that the first job needs no configuration, and exports it to all projects of
/// the server. It is created once and never again, because its deletion was intended.
async fn add_local_fleet(app: &App, admin: UserId) -> Result<()> {
    let db = app.db();
    let Some((project, _)) = crate::db::projects::find(db, PROJECT, admin).await? else { return Ok(()) };
    if fleets::is_name_used(db, project.id, FLEET).await? {
        return Ok(());
    }
    let configuration = json!({
        "type": "fleet", "name": FLEET, "backends": [local::NAME], "nodes": { "min": 1, "max": 1 },
        "blocks": "auto", "idle_duration": "off",
    });
    let configuration =
        Configuration::from_json(&configuration).map_err(|problems| problems_error(&problems))?;
    let Configuration::Fleet(configuration) = configuration else { return Ok(()) };
    let mut configuration = json!(configuration);
    configuration["type"] = json!("fleet");
    let spec = json!({ "configuration": configuration, "profile": { "name": "default", "default": false } });
    let id = FleetId(db.new_id()?);
    let row = NewFleet {
        id,
        project_id: project.id,
        user_id: None,
        name: FLEET.to_owned(),
        spec: spec.to_string(),
        spec_sealed: None,
        status: fleet::Status::Active,
        auto_created: true,
    };
    let message = "Fleet created for the machine of the server".to_owned();
    let because = EventCause { actor: actor(None), reason: "first_start".into(), message };
    let about = EventSubject { entity: Entity::Fleet, id: id.0, name: FLEET, project: Some(project.id) };
    let created = Event::created::<fleet::FleetLifecycle>(id.0, fleet::Status::Active, because);
    let granted = grants::grant_change(app, project.id, local::NAME)?;
    let export = db.new_id()?;
    let exported = [exports::insert(export, project.id, FLEET, true), exports::add_fleet(export, id)];
    let unit = Unit::new().and([fleets::insert(row), granted]).and(exported);
    let unit = unit.and(record(db, None, &about, &created)?);
    match db.write(unit).await {
        Ok(written) => written.done().map(drop).map_err(Error::from),
        // Another replica was faster, or a fleet of that name exists.
        Err(error) if ["fleets_name_key", "exports_name_key"].iter().any(|key| error.is_conflict_on(key)) => {
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Makes the token that the operator chose valid, whatever its state; without one, creates a new token for an admin who
/// has none left.
async fn ensure_token(app: &App, admin: UserId, chosen: Option<Token>) -> Result<Option<Token>> {
    let token = match chosen {
        Some(token) => token,
        None if tokens::has_first_token(app.db(), admin).await? => return Ok(None),
        None => Token::draw()?,
    };
    let change = tokens::ensure(app.db().new_id()?, admin, &token.hash(), token.shown());
    app.db().write(Unit::new().and([change])).await?.done()?;
    app.access().forget();
    Ok(Some(token))
}
