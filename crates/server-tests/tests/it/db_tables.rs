//! The tables besides runs and jobs.

use std::collections::BTreeSet;

use uuid::Uuid;
use windlass_model::{
    event::{Actor, Entity, Event, EventCause},
    fleet, gateway,
    id::{FleetId, GatewayId, InstanceId, RunId, SecretId, UserId, VolumeId},
    instance, volume,
};
use windlass_server::{
    db::{
        Db, Page, TieOrder, Unit, WriteOutcome, backends, encrypted_columns, events, fleets, gateways,
        instances, jobs, projects, repos, runs, secrets, tokens, users, volumes,
    },
    params,
};

use crate::{
    db::on_both,
    db_fixtures::{TestOwner, create_owner, insert_run},
};

on_both! {
    users_are_created_updated_and_deleted
    tokens_are_found_by_hash_while_valid
    projects_list_their_members
    a_project_with_an_active_run_is_not_deleted
    events_are_filtered_by_target_type_and_actor
    events_of_one_unit_are_listed_in_write_order
    a4_a_secret_is_replaced_only_at_the_version_that_was_read
    repos_store_credentials_and_code
    archives_are_stored_once_per_user
    backends_are_stored_listed_deleted_and_granted
    fleets_and_their_instances_are_stored_and_listed
    a_fleet_in_use_is_not_deleted
    an_attached_volume_is_not_deleted
    gateways_are_stored_updated_and_deleted
}

fn full_page() -> Page {
    Page { limit: 100, ..Page::default() }
}

async fn write(db: &Db, unit: Unit) {
    db.write(unit).await.unwrap().done().unwrap();
}

async fn users_are_created_updated_and_deleted(db: &Db) {
    let id = UserId(db.new_id().unwrap());
    let new = users::NewUser {
        id,
        name: "mira",
        admin: false,
        email: None,
        active: true,
        ssh_public_key: "ssh-ed25519 AAAA",
        ssh_private_key_sealed: vec![9],
    };
    write(db, Unit::new().and([users::create(new)])).await;
    let found = users::by_name(db, "mira").await.unwrap().unwrap();
    assert_eq!((found.id, found.admin, found.active), (id, false, true));
    assert_eq!(users::by_names(db, &["mira".into(), "x".into()]).await.unwrap().len(), 1);
    assert_eq!(users::by_ids(db, &[id]).await.unwrap()[0], found);
    for (pattern, count) in [(None, 1), (Some("IR"), 1), (Some("%"), 0), (Some("_"), 0)] {
        assert_eq!(users::list(db, pattern, &full_page()).await.unwrap().1, count, "{pattern:?}");
    }
    write(db, Unit::new().and([users::update(id, true, Some("m@example.org"), false)])).await;
    write(db, Unit::new().and([users::set_ssh_key(id, "ssh-ed25519 BBBB", vec![8])])).await;
    let found = users::by_name(db, "mira").await.unwrap().unwrap();
    assert_eq!((found.admin, found.active, found.email.as_deref()), (true, false, Some("m@example.org")));
    assert_eq!(users::ssh_private_key(db, id).await.unwrap().unwrap(), [8]);
    let key = users::add_public_key(db, id, "laptop", "ssh-ed25519 CCCC", "SHA256:c").await.unwrap();
    let twice = users::add_public_key(db, id, "again", "ssh-ed25519 CCCC", "SHA256:c").await.unwrap_err();
    assert!(twice.is_conflict_on("public_keys_fingerprint_key"));
    assert_eq!(users::public_keys(db, id).await.unwrap().len(), 1);
    users::delete_public_keys(db, id, &[key.id]).await.unwrap();
    assert!(users::public_keys(db, id).await.unwrap().is_empty());
    assert_eq!(
        encrypted_columns::column_values(db, "users", "ssh_private_key_sealed").await.unwrap(),
        [(id.0, vec![8])]
    );
    write(
        db,
        Unit::new().and([encrypted_columns::replace(
            "users",
            "ssh_private_key_sealed",
            id.0,
            vec![8],
            vec![7],
        )]),
    )
    .await;
    assert_eq!(users::ssh_private_key(db, id).await.unwrap().unwrap(), [7]);
    write(db, Unit::new().and(users::delete(id))).await;
    assert!(users::by_name(db, "mira").await.unwrap().is_none());
    assert!(users::by_ids(db, &[id]).await.unwrap()[0].deleted);
}

async fn tokens_are_found_by_hash_while_valid(db: &Db) {
    let user = create_owner(db).await.user;
    let mut ids = Vec::new();
    for (hash, lifetimes) in [("ever", None), ("long", Some(60_000_000)), ("over", Some(-1))] {
        let id = db.new_id().unwrap();
        write(db, Unit::new().and([tokens::create(id, user, hash, "wl_", lifetimes)])).await;
        ids.push(id);
    }
    let found = tokens::find(db, "ever").await.unwrap().unwrap();
    assert_eq!(
        (found.id, found.user.id, found.seen_lately, found.expires_in_us),
        (ids[0], user, false, None)
    );
    assert!(tokens::find(db, "long").await.unwrap().unwrap().expires_in_us.unwrap() > 1_000_000);
    assert!(tokens::find(db, "over").await.unwrap().is_none());
    assert!(tokens::find(db, "none").await.unwrap().is_none());
    tokens::mark_used(db, &ids).await.unwrap();
    assert!(tokens::find(db, "ever").await.unwrap().unwrap().seen_lately);
    assert!(tokens::has_first_token(db, user).await.unwrap());
    write(db, Unit::new().and([tokens::revoke_all(user)])).await;
    assert!(!tokens::has_first_token(db, user).await.unwrap());
    assert!(tokens::find(db, "ever").await.unwrap().is_none());
    for _ in 0..2 {
        write(db, Unit::new().and([tokens::ensure(db.new_id().unwrap(), user, "ever", "wl_")])).await;
        assert_eq!(tokens::find(db, "ever").await.unwrap().unwrap().id, ids[0]);
    }
}

async fn projects_list_their_members(db: &Db) {
    let TestOwner { user, project } = create_owner(db).await;
    let (found, membership) = projects::find(db, "main", user).await.unwrap().unwrap();
    assert_eq!((found.id, membership), (project, None));
    let role = projects::Membership {
        role: "manager".into(),
        can_manage_ssh_fleets: true,
        can_manage_secrets: false,
    };
    for _ in 0..2 {
        write(db, Unit::new().and([projects::set_member(project, user, &role, 0)])).await;
    }
    assert_eq!(projects::find(db, "main", user).await.unwrap().unwrap().1, Some(role.clone()));
    assert_eq!(projects::role(db, project, user).await.unwrap().0.as_deref(), Some("manager"));
    write(db, Unit::new().and([projects::set_can_manage_ssh_fleets(project, user, false)])).await;
    write(db, Unit::new().and([projects::set_member(project, user, &role, 0)])).await;
    let kept = projects::find(db, "main", user).await.unwrap().unwrap().1.unwrap();
    assert!(!kept.can_manage_ssh_fleets, "a new role neither gives nor takes the right");
    write(db, Unit::new().and([projects::set_can_manage_ssh_fleets(project, user, true)])).await;
    let members = projects::members(db, &[project]).await.unwrap();
    assert_eq!((members.len(), &members[0].membership), (1, &role));
    for seen in [
        projects::ProjectVisibility::All,
        projects::ProjectVisibility::Joined(user),
        projects::ProjectVisibility::JoinedOrPublic(user),
    ] {
        let requested = projects::ProjectQuery {
            seen,
            pattern: Some("ai"),
            member: Some("owner"),
            without_fleets: true,
            page: full_page(),
        };
        assert_eq!(projects::list(db, &requested).await.unwrap().1, 1, "{seen:?}");
    }
    write(
        db,
        Unit::new().and([projects::update(project, true, Some("https://example.org/t"), Some("base:1"), 3)]),
    )
    .await;
    assert!(projects::find(db, "main", user).await.unwrap().unwrap().0.is_public);
    assert_eq!(projects::owned_count(db, user).await.unwrap(), 1);
    write(db, Unit::new().and([projects::remove_members(project, &[user])])).await;
    assert!(projects::members(db, &[project]).await.unwrap().is_empty());
}

async fn a_project_with_an_active_run_is_not_deleted(db: &Db) {
    let made = create_owner(db).await;
    let id = insert_run(db, &made, "train").await;
    let delete = || Unit::new().and([projects::delete(made.project)]);
    assert_eq!(db.write(delete()).await.unwrap(), WriteOutcome::Stale { at: Some(0) });
    write(db, Unit::new().exec("UPDATE runs SET finished = TRUE WHERE id = $1", params![id])).await;
    write(db, delete()).await;
    assert!(projects::find(db, "main", made.user).await.unwrap().is_none());
}

async fn events_are_filtered_by_target_type_and_actor(db: &Db) {
    let TestOwner { user, project } = create_owner(db).await;
    let fleet = FleetId(db.new_id().unwrap());
    for actor in [Actor::User(user), Actor::Server] {
        let because = EventCause { actor, reason: "why".into(), message: "Fleet seen".into() };
        let event = Event::note(Entity::Fleet, fleet.0, because);
        let by = matches!(actor, Actor::User(_)).then_some(user);
        let targets = [events::EventTarget { entity: Entity::Fleet, id: fleet.0, name: "gpus" }];
        let place = events::EventContext {
            project: Some(project),
            user: by,
            lock_token: Some(fleet.0),
            targets: &targets,
        };
        write(db, Unit::new().and(events::append(db, &event, &place).unwrap())).await;
    }
    let (ids, kinds, other) = ([fleet.0], ["fleet".to_owned()], [project.0]);
    let base = || events::EventQuery { page: full_page(), ..events::EventQuery::default() };
    let requested = [
        (base(), 2),
        (events::EventQuery { targets: Some(&ids), ..base() }, 2),
        (events::EventQuery { targets: Some(&other), ..base() }, 0),
        (events::EventQuery { types: Some(&kinds), ..base() }, 2),
        (events::EventQuery { within: Some((&ids, None)), ..base() }, 2),
        (events::EventQuery { within: Some((&ids, Some(events::ParentKind::Fleet))), ..base() }, 2),
        (events::EventQuery { within: Some((&ids, Some(events::ParentKind::Run))), ..base() }, 2),
        (events::EventQuery { within: Some((&other, Some(events::ParentKind::Project))), ..base() }, 2),
        (events::EventQuery { actors: Some((vec![user.0], false)), ..base() }, 1),
        (events::EventQuery { actors: Some((vec![], true)), ..base() }, 1),
        (events::EventQuery { visible_to: Some(user), ..base() }, 0),
    ];
    for (requested, count) in requested {
        let found = events::list(db, &requested).await.unwrap();
        assert_eq!(found.len(), count, "{requested:?}");
        assert!(found.iter().all(|event| event.targets[0].name == "gpus"));
    }
    let first = &events::list(db, &base()).await.unwrap()[0];
    let after = Page { time: Some(first.recorded_at), id: Some(first.id), ..full_page() };
    let next =
        events::list(db, &events::EventQuery { page: after, ..events::EventQuery::default() }).await.unwrap();
    assert_eq!(next.len(), 1);
    assert_ne!(next[0].id, first.id);
}

/// Events of one unit have the same time. In descending order they are the same, page by page.
async fn events_of_one_unit_are_listed_in_write_order(db: &Db) {
    let place = events::EventContext { project: None, user: None, lock_token: None, targets: &[] };
    let mut unit = Unit::new();
    for number in 0..5 {
        let because = EventCause {
            actor: Actor::Server,
            reason: "told".to_owned(),
            message: format!("of one: {number}"),
        };
        let event = Event::note(Entity::Fleet, db.new_id().unwrap(), because);
        unit = unit.and(events::append(db, &event, &place).unwrap());
    }
    write(db, unit).await;
    let mut all = Vec::new();
    let mut page = Page { limit: 2, ties: TieOrder::FollowTime, ..full_page() };
    loop {
        let found =
            events::list(db, &events::EventQuery { page, ..events::EventQuery::default() }).await.unwrap();
        let Some(last) = found.last() else { break };
        (page.time, page.id) = (Some(last.recorded_at), Some(last.id));
        all.extend(found);
    }
    let reported: Vec<&str> = all.iter().rev().map(|event| event.message.as_str()).collect();
    assert_eq!(reported, ["of one: 0", "of one: 1", "of one: 2", "of one: 3", "of one: 4"]);
}

async fn a4_a_secret_is_replaced_only_at_the_version_that_was_read(db: &Db) {
    let project = create_owner(db).await.project;
    let id = SecretId(db.new_id().unwrap());
    write(db, Unit::new().and([secrets::create(id, project, "token", vec![1], "k1", "everyone")])).await;
    let twice = SecretId(db.new_id().unwrap());
    let twice = Unit::new().and([secrets::create(twice, project, "token", vec![1], "k1", "everyone")]);
    assert!(db.write(twice).await.unwrap_err().is_conflict_on("secrets_name_key"));
    let replace = |version| Unit::new().and([secrets::replace(id, version, vec![2], "k2", "managers")]);
    write(db, replace(1)).await;
    assert_eq!(db.write(replace(1)).await.unwrap(), WriteOutcome::Stale { at: Some(0) });
    let found = secrets::find(db, project, "token").await.unwrap().unwrap();
    assert_eq!((found.version, found.sealed, found.key_id.as_str()), (2, vec![2], "k2"));
    assert_eq!(found.users, "managers");
    assert_eq!(secrets::find_named(db, project, ["token", "none"]).await.unwrap().len(), 1);
    assert_eq!(secrets::list(db, project).await.unwrap().len(), 1);
    assert_eq!(encrypted_columns::secrets(db).await.unwrap().len(), 1);
    write(db, Unit::new().and([encrypted_columns::replace_secret(id, 2, "k3", vec![3])])).await;
    assert_eq!(secrets::find(db, project, "token").await.unwrap().unwrap().key_id, "k3");
    write(db, Unit::new().and([secrets::delete(project, "token")])).await;
    assert!(secrets::find(db, project, "token").await.unwrap().is_none());
}

async fn repos_store_credentials_and_code(db: &Db) {
    let TestOwner { user, project } = create_owner(db).await;
    let mut ids = Vec::new();
    for info in ["{}", r#"{"repo_name":"x"}"#] {
        let unit = Unit::new()
            .and([repos::put(db.new_id().unwrap(), project, "repo", "remote", info)])
            .and([repos::put_creds(project, "repo", user, info.into())]);
        let (_, rows) = db.write(unit).await.unwrap().done().unwrap();
        ids.push(rows[0][0].uuid(0).unwrap());
    }
    assert_eq!(ids[0], ids[1], "put again, it is the same repo");
    let repo = repos::find(db, project, "repo").await.unwrap().unwrap();
    assert_eq!((repo.id, repo.info.as_str()), (ids[0], r#"{"repo_name":"x"}"#));
    assert_eq!(repos::creds(db, repo.id, user).await.unwrap().unwrap(), repo.info.as_bytes());
    let unknown = Unit::new().and([repos::put_creds(project, "unknown", user, vec![])]);
    assert_eq!(db.write(unknown).await.unwrap(), WriteOutcome::Stale { at: Some(0) });
    for _ in 0..2 {
        let code = repos::put_code(db.new_id().unwrap(), repo.id, user, "hash", vec![5; 1000], None);
        write(db, Unit::new().and([code])).await;
    }
    assert_eq!(repos::code(db, repo.id, "hash").await.unwrap().unwrap().len(), 1000);
    assert!(repos::code(db, repo.id, "other").await.unwrap().is_none());
    assert_eq!(encrypted_columns::repo_creds(db).await.unwrap().len(), 1);
    assert_eq!(repos::list(db, project).await.unwrap().len(), 1);
    write(db, Unit::new().and([repos::delete(project, "repo")])).await;
    assert!(repos::find(db, project, "repo").await.unwrap().is_none());
    assert!(repos::code(db, repo.id, "hash").await.unwrap().is_none(), "its code is gone with it");
}

async fn archives_are_stored_once_per_user(db: &Db) {
    let user = create_owner(db).await.user;
    let mut ids: Vec<Uuid> = Vec::new();
    for _ in 0..2 {
        let unit =
            Unit::new().and([repos::put_archive(db.new_id().unwrap(), user, "hash", vec![7, 7], None)]);
        let (_, rows) = db.write(unit).await.unwrap().done().unwrap();
        ids.push(rows[0][0].uuid(0).unwrap());
    }
    assert_eq!(ids[0], ids[1]);
    assert_eq!(repos::find_archive(db, user, "hash").await.unwrap(), Some(ids[0]));
    assert_eq!(repos::find_archive(db, user, "other").await.unwrap(), None);
    assert_eq!(repos::archive(db, ids[0]).await.unwrap().unwrap(), (user, "hash".into(), vec![7, 7]));
}

async fn backends_are_stored_listed_deleted_and_granted(db: &Db) {
    let project = create_owner(db).await.project;
    for config in ["{}", r#"{"a":1}"#] {
        let put = backends::put(db.new_id().unwrap(), project, "aws", config, Some(vec![1]));
        write(db, Unit::new().and([put])).await;
    }
    let found = backends::list(db, project).await.unwrap();
    assert_eq!((found.len(), found[0].config.as_str()), (1, r#"{"a":1}"#));
    assert_eq!(backends::list_kinds(db, &[project]).await.unwrap(), [(project, "aws".to_owned())]);
    write(db, Unit::new().and([backends::delete(project, "aws")])).await;
    assert!(backends::list(db, project).await.unwrap().is_empty());
    for _ in 0..2 {
        write(db, Unit::new().and([backends::grant(db.new_id().unwrap(), project, "local")])).await;
    }
    assert_eq!(backends::list_granted(db, project).await.unwrap(), BTreeSet::from(["local".to_owned()]));
}

async fn insert_fleet(db: &Db, made: &TestOwner, name: &str) -> FleetId {
    let id = FleetId(db.new_id().unwrap());
    let new = fleets::NewFleet {
        id,
        project_id: made.project,
        user_id: Some(made.user),
        name: name.into(),
        spec: "{}".into(),
        spec_sealed: Some(vec![4]),
        status: fleet::Status::Active,
        auto_created: false,
    };
    write(db, Unit::new().and([fleets::insert(new)])).await;
    id
}

fn new_instance(made: &TestOwner, id: InstanceId, fleet: FleetId, number: i64) -> instances::NewInstance {
    instances::NewInstance {
        id,
        project_id: made.project,
        fleet_id: Some(fleet),
        name: format!("gpus-{number}"),
        instance_num: number,
        backend: Some("remote".into()),
        region: None,
        hostname: Some("10.0.0.1".into()),
        price: Some(0.25),
        spot: false,
        instance_type: Some("{}".into()),
        offer: None,
        provisioning: None,
        ssh: None,
        ssh_sealed: Some(vec![6]),
        requirements: None,
        profile: None,
        status: instance::Status::Pending,
        total_blocks: Some(1),
        idle_seconds_max: None,
    }
}

async fn fleets_and_their_instances_are_stored_and_listed(db: &Db) {
    let made = create_owner(db).await;
    let id = insert_fleet(db, &made, "gpus").await;
    let found = fleets::find_by_name(db, made.project, "gpus").await.unwrap().unwrap();
    assert_eq!(found, fleets::find(db, id).await.unwrap().unwrap());
    assert_eq!(fleets::sealed_column(db, id).await.unwrap().unwrap(), [4]);
    write(db, Unit::new().and([fleets::set_spec(id, r#"{"b":1}"#, None)])).await;
    let query = fleets::Query {
        projects: Some(vec![made.project]),
        only_active: true,
        page: full_page(),
        ..fleets::Query::default()
    };
    assert_eq!(fleets::list(db, &query).await.unwrap()[0].spec, r#"{"b":1}"#);

    let one = InstanceId(db.new_id().unwrap());
    write(db, Unit::new().and([instances::insert(new_instance(&made, one, id, 0))])).await;
    let two = InstanceId(db.new_id().unwrap());
    let same = Unit::new().and([instances::insert(new_instance(&made, two, id, 0))]);
    assert!(db.write(same).await.unwrap_err().is_conflict_on("instances_num_key"));
    write(db, Unit::new().and([instances::insert(new_instance(&made, two, id, 1))])).await;
    let found = instances::list_by_fleets(db, &[id]).await.unwrap();
    assert_eq!(found.iter().map(|instance| instance.id).collect::<Vec<_>>(), [one, two]);
    assert_eq!(found[0], instances::find(db, one).await.unwrap().unwrap());
    assert_eq!(found[0].price, Some(0.25));
    assert_eq!(instances::sealed_columns(db, one).await.unwrap(), (Some(vec![6]), None));
    assert!(instances::job_names(db, &[one], None).await.unwrap().is_empty());
    let query = instances::Query {
        projects: Some(vec![made.project]),
        fleets: Some(vec![id]),
        only_active: true,
        page: Page { limit: 1, ..Page::default() },
        ..instances::Query::default()
    };
    let first = instances::list(db, &query).await.unwrap();
    let rest = Page { time: Some(first[0].created_at), id: Some(first[0].id.0), ..full_page() };
    let rest = instances::list(db, &instances::Query { page: rest, ..query }).await.unwrap();
    assert_eq!((first[0].id, rest[0].id, rest.len()), (two, one, 1), "newest first");
}

async fn a_fleet_in_use_is_not_deleted(db: &Db) {
    let made = create_owner(db).await;
    let id = insert_fleet(db, &made, "gpus").await;
    let instance = InstanceId(db.new_id().unwrap());
    write(db, Unit::new().and([instances::insert(new_instance(&made, instance, id, 0))])).await;
    let run: RunId = insert_run(db, &made, "train").await;
    let job = db.new_id().unwrap();
    let sql = "INSERT INTO jobs (id, run_id, project_id, job_name, replica_num, job_num, submission_num, status, \
               job_spec, instance_id, submitted_at, last_processed_at) \
               VALUES ($1, $2, $3, 'train-0-0', 0, 0, 0, 'running', '{}', $4, now_us(), now_us())";
    write(db, Unit::new().exec(sql, params![job, run, made.project, instance])).await;
    assert_eq!(jobs::list_by_instance(db, instance).await.unwrap().len(), 1);
    assert_eq!(instances::job_names(db, &[instance], None).await.unwrap()[0].1, "train-0-0");
    let delete = || Unit::new().and([fleets::request_delete(id)]);
    assert_eq!(db.write(delete()).await.unwrap(), WriteOutcome::Stale { at: Some(0) });
    write(db, Unit::new().exec("UPDATE jobs SET finished = TRUE WHERE id = $1", params![job])).await;
    write(db, delete()).await;
    assert!(fleets::find(db, id).await.unwrap().unwrap().termination_asked_at.is_some());
    let late = Unit::new().and([fleets::set_spec(id, "{}", None)]);
    assert_eq!(db.write(late).await.unwrap(), WriteOutcome::Stale { at: Some(0) });
    assert!(runs::find(db, run).await.unwrap().is_some());
}

async fn an_attached_volume_is_not_deleted(db: &Db) {
    let made = create_owner(db).await;
    let id = VolumeId(db.new_id().unwrap());
    let new = volumes::NewVolume {
        id,
        project_id: made.project,
        user_id: made.user,
        name: "data".into(),
        configuration: "{}".into(),
        external: false,
        status: volume::Status::Submitted,
    };
    write(db, Unit::new().and([volumes::insert(new)])).await;
    let found = volumes::find_by_name(db, made.project, "data").await.unwrap().unwrap();
    assert_eq!(found, volumes::find(db, id).await.unwrap().unwrap());
    let query = volumes::Query { projects: None, only_active: true, page: full_page() };
    assert_eq!(volumes::list(db, &query).await.unwrap(), [found]);
    let instance = InstanceId(db.new_id().unwrap());
    let fleet = insert_fleet(db, &made, "gpus").await;
    write(db, Unit::new().and([instances::insert(new_instance(&made, instance, fleet, 0))])).await;
    let attach = "INSERT INTO volume_attachments (volume_id, instance_id, data, attached_at) \
                  VALUES ($1, $2, '{}', now_us())";
    write(db, Unit::new().exec(attach, params![id, instance])).await;
    let attached = volumes::attachments(db, &[id]).await.unwrap();
    assert_eq!((attached.len(), attached[0].data.as_deref()), (1, Some("{}")));
    let delete = || Unit::new().and(volumes::request_delete(id));
    assert_eq!(db.write(delete()).await.unwrap(), WriteOutcome::Stale { at: Some(1) });
    write(db, Unit::new().exec("DELETE FROM volume_attachments WHERE volume_id = $1", params![id])).await;
    write(db, delete()).await;
    assert!(volumes::find(db, id).await.unwrap().unwrap().delete_asked_at.is_some());
}

async fn gateways_are_stored_updated_and_deleted(db: &Db) {
    let made = create_owner(db).await;
    let id = GatewayId(db.new_id().unwrap());
    let new = gateways::NewGateway {
        id,
        project_id: made.project,
        name: "gate".into(),
        backend: Some("aws".into()),
        region: None,
        configuration: "{}".into(),
        wildcard_domain: None,
        status: gateway::Status::Submitted,
    };
    write(db, Unit::new().and([gateways::insert(new)])).await;
    write(db, Unit::new().and([gateways::set_wildcard_domain(id, Some("*.example.org"))])).await;
    let found = gateways::find_by_name(db, made.project, "gate").await.unwrap().unwrap();
    assert_eq!(found.wildcard_domain.as_deref(), Some("*.example.org"));
    assert_eq!(gateways::list(db, made.project).await.unwrap(), [found]);
    write(db, Unit::new().and([gateways::delete(id)])).await;
    assert!(gateways::find(db, id).await.unwrap().unwrap().deleted);
}
