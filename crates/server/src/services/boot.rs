//! The first start: an admin, a project, a token. Every later start finds them and changes nothing.

use windlass_api::error::Code;
use windlass_model::id::UserId;

use super::{projects, users};
use crate::{
    app::App,
    auth::Token,
    db::{Unit, tokens, users as user_rows},
    error::{Error, Result},
};

const ADMIN: &str = "admin";
const PROJECT: &str = "main";

/// How often another replica, starting at the same moment, may be faster.
const TRIES_MAX: usize = 5;

/// The admin's token when this start made it: shown once.
pub async fn ensure(app: &App) -> Result<Option<Token>> {
    for _ in 1..TRIES_MAX {
        match try_ensure(app).await {
            Err(Error::Refused { code: Code::ResourceExists, .. }) => {}
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
        Some(admin) => (admin.id, give(app, admin.id, chosen).await?),
        None => {
            let (id, token) = users::add(app, None, ADMIN, true, None, true, chosen).await?;
            (id, Some(token))
        }
    };
    if crate::db::projects::find(app.db(), PROJECT, id).await?.is_none() {
        projects::add(app, id, PROJECT, false, None).await?;
    }
    // Whoever chose the token knows it.
    Ok(fresh.filter(|_| !given))
}

/// The token that the operator chose works, whatever happened to it; without one, the admin who lost
/// every token gets a new one.
async fn give(app: &App, admin: UserId, chosen: Option<Token>) -> Result<Option<Token>> {
    let token = match chosen {
        Some(token) => token,
        None if tokens::any(app.db(), admin).await? => return Ok(None),
        None => Token::draw()?,
    };
    let change = tokens::ensure(app.db().new_id()?, admin, &token.hash(), token.shown());
    app.db().write(Unit::new().and([change])).await?.done()?;
    app.access().forget();
    Ok(Some(token))
}
