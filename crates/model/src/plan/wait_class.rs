//! Classes of waiting replicas: those that placement cannot tell apart, except by their place in the queue.
//!
//! If the first of a class does not fit now, no other of it does. So only the first is evaluated while it waits.

use std::fmt::Write as _;

use crate::{
    config::name::ResourceReference,
    plan::{
        execution_mode::ImageChoice,
        offers::InstanceNeeds,
        place::{FleetChoice, WaitingReplica},
    },
};

/// Returns a text that is equal for replicas of one class; `None` for a replica that waits by itself.
///
/// Several nodes, volumes, and a run whose fleet another job chooses wait for more than capacity: each of them is
/// evaluated by itself. `fleet_names` is used instead of the ids of the fleets, because a fleet with a known name may be
/// created later.
pub fn class_text(waiting: &WaitingReplica, fleet_names: Option<&[ResourceReference]>) -> Option<String> {
    // Every field by name, so that one that is added later cannot be forgotten.
    let WaitingReplica {
        project,
        user,
        run: _,
        replica_num: _,
        class,
        priority,
        since: _,
        nodes,
        fleet_choice,
        // Follow from the project.
        usable_fleets: _,
        fleets: _,
        creation,
        max_duration,
        resubmitted_at,
        // Determined by the names.
        missing_fleets: _,
    } = waiting;
    // Its place in the queue is not the time of its submission.
    if resubmitted_at.is_some() {
        return None;
    }
    let [node] = nodes.as_slice() else { return None };
    let fleet = match fleet_choice {
        FleetChoice::Chosen(fleet) => Some(*fleet),
        FleetChoice::Choose => None,
        FleetChoice::Follow => return None,
    };
    if !node.needs.volumes.is_empty() {
        return None;
    }
    let mut text = format!(
        "{project} {user} {class} {priority} {fleet:?} {fleet_names:?} {creation:?} {max_duration:?} "
    );
    let needs = InstanceNeeds { image: None, ..InstanceNeeds::clone(&node.needs) };
    // Writing to a string does not fail.
    let _ = write!(text, "{} {needs:?}", image_kind(node.needs.image.as_ref()));
    Some(text)
}

/// The name of an image decides nothing, only whether there is one.
fn image_kind(image: Option<&ImageChoice>) -> &'static str {
    match image {
        None => "any",
        Some(ImageChoice::Image(_)) => "image",
        Some(ImageChoice::PlainProcess) => "process",
        Some(ImageChoice::Default { image: Some(_) }) => "default image",
        Some(ImageChoice::Default { image: None }) => "default",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use uuid::Uuid;

    use super::*;
    use crate::{
        config::run::RunClass,
        id::{FleetId, ProjectId, RunId, SubmissionId, UserId},
        plan::{
            offers::Location,
            place::{InstanceCreation, WaitingNode},
        },
        time::{Span, Timestamp},
    };

    fn waiting(number: u128, image: &str) -> WaitingReplica {
        let needs =
            InstanceNeeds { image: Some(ImageChoice::Image(image.to_owned())), ..InstanceNeeds::default() };
        WaitingReplica {
            project: ProjectId(Uuid::from_u128(1)),
            user: UserId(Uuid::from_u128(1)),
            run: RunId(Uuid::from_u128(number)),
            replica_num: 0,
            class: RunClass::Normal,
            priority: 50,
            since: Timestamp(i64::try_from(number).unwrap()),
            nodes: vec![WaitingNode { job: SubmissionId(Uuid::from_u128(number)), needs: Arc::new(needs) }],
            fleet_choice: FleetChoice::Choose,
            usable_fleets: None,
            fleets: None,
            missing_fleets: Vec::new(),
            creation: InstanceCreation::Reuse,
            max_duration: None,
            resubmitted_at: None,
        }
    }

    fn with_needs(change: impl FnOnce(&mut InstanceNeeds)) -> WaitingReplica {
        let mut one = waiting(1, "debian");
        change(Arc::make_mut(&mut one.nodes[0].needs));
        one
    }

    #[test]
    fn equal_requests_of_different_runs_are_one_class_whatever_their_image_is_called() {
        let one = class_text(&waiting(1, "debian"), None);
        assert!(one.is_some());
        assert_eq!(one, class_text(&waiting(2, "ubuntu"), None));
    }

    #[test]
    fn everything_that_placement_reads_makes_another_class() {
        let one = waiting(1, "debian");
        let mut others = vec![
            WaitingReplica { project: ProjectId(Uuid::from_u128(2)), ..one.clone() },
            WaitingReplica { user: UserId(Uuid::from_u128(2)), ..one.clone() },
            WaitingReplica { priority: 51, ..one.clone() },
            WaitingReplica { class: RunClass::Idle, ..one.clone() },
            WaitingReplica { creation: InstanceCreation::ReuseOrCreate, ..one.clone() },
            WaitingReplica { max_duration: Some(Span::secs(1)), ..one.clone() },
            WaitingReplica { fleet_choice: FleetChoice::Chosen(FleetId(Uuid::from_u128(3))), ..one.clone() },
            with_needs(|needs| needs.spot = Some(true)),
            with_needs(|needs| needs.regions = Some(vec!["here".to_owned()])),
            with_needs(|needs| needs.image = Some(ImageChoice::PlainProcess)),
        ];
        let texts: Vec<_> = others.drain(..).map(|other| class_text(&other, None).unwrap()).collect();
        let first = class_text(&one, None).unwrap();
        let named =
            class_text(&one, ResourceReference::parse("gpus").as_ref().map(std::slice::from_ref)).unwrap();
        for (at, text) in texts.iter().chain([&named]).enumerate() {
            assert_ne!(*text, first, "change {at} makes no difference");
        }
    }

    #[test]
    fn nodes_volumes_and_followers_of_a_choice_wait_by_themselves() {
        let mut several = waiting(1, "debian");
        several.nodes.push(several.nodes[0].clone());
        let place = Location { backend: "b".to_owned(), region: "r".to_owned(), zone: None };
        let with_volume = with_needs(|needs| needs.volumes = vec![vec![place]]);
        let follower = WaitingReplica { fleet_choice: FleetChoice::Follow, ..waiting(1, "debian") };
        let preempted = WaitingReplica { resubmitted_at: Some(Timestamp(9)), ..waiting(1, "debian") };
        for one in [several, with_volume, follower, preempted] {
            assert_eq!(class_text(&one, None), None);
        }
    }
}
