//! Saved views of lists.

use windlass_api::views::{DeleteRequest, SetRequest, View, ViewList};
use windlass_model::id::ProjectId;

use crate::{
    app::App,
    auth::Caller,
    db::{
        projects,
        series::{self as rows, NewView, SavedView},
    },
    error::{Error, Result},
};

const NAME_MAX: usize = 80;
const QUERY_MAX: usize = 2000;
const VIEWS_MAX: usize = 200;
/// Lists that have views.
const PAGES: [&str; 6] = ["runs", "jobs", "instances", "containers", "events", "queue"];

pub(crate) async fn list(app: &App, caller: &Caller) -> Result<ViewList> {
    Ok(ViewList { views: visible(app, caller).await?.into_iter().map(to_wire).collect() })
}

async fn visible(app: &App, caller: &Caller) -> Result<Vec<SavedView>> {
    let projects = projects::visible(app.db(), caller.user.id, caller.user.admin).await?;
    let ids: Vec<ProjectId> = projects.into_iter().map(|(id, ..)| id).collect();
    Ok(rows::views(app.db(), caller.user.id, &ids).await?)
}

pub(crate) async fn set(app: &App, caller: &Caller, requested: SetRequest) -> Result<View> {
    let SetRequest { name, page, query, project } = requested;
    if name.trim().is_empty() || name.chars().count() > NAME_MAX {
        return Err(Error::field("name", format!("must have from 1 to {NAME_MAX} characters")));
    }
    if !PAGES.contains(&page.as_str()) {
        return Err(Error::field("page", format!("must be one of {}", PAGES.join(", "))));
    }
    if query.len() > QUERY_MAX {
        return Err(Error::field("query", format!("must be at most {QUERY_MAX} bytes")));
    }
    let project_id = match &project {
        None => None,
        Some(project) => {
            let joined = projects::visible(app.db(), caller.user.id, caller.user.admin).await?;
            let found = joined.into_iter().find(|(_, name, _)| name == project);
            Some(found.ok_or_else(|| Error::absent("Project"))?.0)
        }
    };
    let before = visible(app, caller).await?;
    let is_same = |view: &SavedView| {
        view.user_id == caller.user.id && view.page == page && view.name == name && view.project == project
    };
    let own = before.iter().filter(|view| view.user_id == caller.user.id).count();
    let existing = before.iter().find(|view| is_same(view)).map(|view| view.id);
    if existing.is_none() && own >= VIEWS_MAX {
        return Err(Error::refused(format!("you have {VIEWS_MAX} views; delete one first")));
    }
    let id = existing.unwrap_or(app.db().new_id()?);
    let view =
        NewView { id, user: caller.user.id, project: project_id, page: &page, name: &name, query: &query };
    rows::set_view(app.db(), view).await?;
    Ok(View { id, name, page, query, project, user: caller.user.name.clone() })
}

/// Deletes a view of the caller; those of others have their owners.
pub(crate) async fn delete(app: &App, caller: &Caller, requested: DeleteRequest) -> Result<()> {
    let found = visible(app, caller).await?.into_iter().find(|view| view.id == requested.id);
    let view = found.ok_or_else(|| Error::absent("View"))?;
    if view.user_id != caller.user.id {
        return Err(Error::denied_with(format!("view `{}` belongs to {}", view.name, view.user)));
    }
    rows::delete_view(app.db(), view.id, caller.user.id).await?;
    Ok(())
}

fn to_wire(view: SavedView) -> View {
    View {
        id: view.id,
        name: view.name,
        page: view.page,
        query: view.query,
        project: view.project,
        user: view.user,
    }
}
