//! Reading of events.

use uuid::Uuid;
use windlass_api::events as wire;

use crate::{
    app::App,
    auth::Caller,
    db::{
        Page, TieOrder,
        events::{self, EventQuery, EventView, ParentKind},
    },
    error::{Error, Result},
};

const IDS_MAX: usize = 16;
const LIMIT_MAX: i64 = 100;

pub async fn list(app: &App, caller: &Caller, requested: wire::ListRequest) -> Result<Vec<wire::Event>> {
    if !(1..=LIMIT_MAX).contains(&requested.limit) {
        return Err(Error::field("limit", "must be from 1 to 100"));
    }
    let targets = [
        &requested.target_projects,
        &requested.target_users,
        &requested.target_fleets,
        &requested.target_instances,
        &requested.target_runs,
        &requested.target_jobs,
        &requested.target_volumes,
        &requested.target_gateways,
        &requested.target_gateway_replicas,
        &requested.target_secrets,
        &requested.target_presets,
        &requested.target_managed_jobs,
    ];
    let within = [
        (&requested.within_projects, Some(ParentKind::Project)),
        (&requested.within_runs, Some(ParentKind::Run)),
        (&requested.within_fleets, Some(ParentKind::Fleet)),
        (&requested.within_gateways, None),
    ];
    let target = single_filter("target_*", targets.into_iter().flatten())?;
    let place = single_filter("within_*", within.iter().filter_map(|(ids, _)| ids.as_ref()))?;
    let kind = within.iter().find(|(ids, _)| ids.is_some()).and_then(|(_, kind)| *kind);
    let actors = requested
        .actors
        .as_ref()
        .map(|actors| (actors.iter().copied().flatten().collect(), actors.iter().any(Option::is_none)));
    let rows = events::list(
        app.db(),
        &EventQuery {
            visible_to: (!caller.user.admin).then_some(caller.user.id),
            targets: target,
            within: place.map(|ids| (ids, kind)),
            types: requested.include_target_types.as_deref(),
            actors,
            reasons: requested.reasons.as_deref(),
            kinds: requested.kinds.as_deref(),
            entities: requested.entities.as_deref(),
            since: requested.since,
            until: requested.until,
            text: requested.text.as_deref(),
            page: Page {
                time: requested.prev_recorded_at,
                id: requested.prev_id,
                limit: requested.limit,
                ascending: requested.ascending,
                // Events of one unit share their time; their ids preserve their order.
                ties: TieOrder::FollowTime,
            },
        },
    )
    .await?;
    let is_browser = caller.session().is_some();
    Ok(rows.into_iter().map(|event| to_wire(event, is_browser)).collect())
}

/// Returns the filter of its kind that is set; more than one is an error.
fn single_filter<'a>(what: &str, mut set: impl Iterator<Item = &'a Vec<Uuid>>) -> Result<Option<&'a [Uuid]>> {
    let Some(ids) = set.next() else { return Ok(None) };
    if set.next().is_some() {
        return Err(Error::field(what, "at most one of these filters may be set"));
    }
    if !(1..=IDS_MAX).contains(&ids.len()) {
        return Err(Error::field(what, "must contain from 1 to 16 ids"));
    }
    Ok(Some(ids))
}

fn to_wire(event: EventView, detailed: bool) -> wire::Event {
    let (user_id, user, deleted) = match event.actor {
        Some((id, name, deleted)) => (Some(id), Some(name), Some(deleted)),
        None => (None, None, None),
    };
    wire::Event {
        id: event.id,
        message: event.message,
        recorded_at: event.recorded_at,
        actor_user_id: user_id,
        actor_user: user,
        is_actor_user_deleted: deleted,
        targets: event
            .targets
            .into_iter()
            .map(|target| {
                let (project_id, project_name, deleted) = match target.project {
                    Some((id, name, deleted)) => (Some(id), Some(name), Some(deleted)),
                    None => (None, None, None),
                };
                wire::Target {
                    r#type: target.kind,
                    project_id,
                    project_name,
                    is_project_deleted: deleted,
                    id: target.id,
                    name: target.name,
                }
            })
            .collect(),
        details: detailed.then_some(wire::EventDetails {
            seq: event.seq,
            kind: event.kind,
            entity: event.entity,
            from: event.from,
            to: event.to,
            reason: event.reason,
            is_final: event.is_final,
            actor: event.actor_name,
            cause: None,
        }),
    }
}
