//! Two dispatchers with separate tokens over one queue of a thousand.

use std::collections::BTreeMap;

use futures_util::{StreamExt as _, future::join, stream};
use serde_json::{Value, json};

use crate::{
    http::{ADMIN_TOKEN, ServerFixture, on_both},
    http_queue::QueueClient,
};

on_both! {
    two_dispatchers_lock_each_of_a_thousand_containers_once_and_the_loser_gets_422
}

const CONTAINERS: usize = 1_000;
/// Maximum number of concurrent calls of each dispatcher.
const CALLS_MAX: usize = 8;

async fn two_dispatchers_lock_each_of_a_thousand_containers_once_and_the_loser_gets_422(
    ground: &ServerFixture,
) {
    let server = &ground.start().await;
    let queue = &QueueClient { server };
    let made: Vec<String> = stream::iter(0..CONTAINERS)
        .map(|at| async move { queue.requested(json!({ "priority": 1 + at % 1000 })).await.1 })
        .buffer_unordered(CALLS_MAX)
        .collect()
        .await;
    let (one, two) = (&queue.dispatcher().await, &queue.dispatcher().await);
    // Both process the whole queue from its head. With equal orders the faster one could win all of it; so the second
    // swaps neighbouring blocks, and each is ahead of the other in every second block.
    let swapped: Vec<String> = made
        .chunks(2 * CALLS_MAX)
        .flat_map(|pair| pair.iter().skip(CALLS_MAX).chain(pair.iter().take(CALLS_MAX)))
        .cloned()
        .collect();
    let race = |token, order: Vec<String>| {
        stream::iter(order)
            .map(move |uuid| async move {
                let path = format!("containers/{uuid}/lock");
                let (status, answer) = queue.call(token, "POST", &path, Value::Null).await;
                (uuid, status, answer)
            })
            .buffered(CALLS_MAX)
            .collect::<Vec<_>>()
    };
    let (first, second) = join(race(one, made), race(two, swapped)).await;
    let mut winners: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (token, answers) in [(one, &first), (two, &second)] {
        let holder = token.split('/').nth(1).unwrap();
        for (uuid, status, answer) in answers {
            match status {
                200 => {
                    assert_eq!(answer["locked_by_uuid"], holder);
                    assert_eq!(
                        (answer["attempt"].as_u64(), answer["lock_count"].as_u64()),
                        (Some(1), Some(1))
                    );
                    winners.entry(uuid).or_default().push(holder);
                }
                422 => assert!(answer["errors"][0].as_str().unwrap().contains("cannot lock"), "{answer}"),
                other => panic!("{uuid}: {other} {answer}"),
            }
        }
    }
    assert_eq!(winners.len(), CONTAINERS, "some were locked by nobody");
    assert!(winners.values().all(|one| one.len() == 1), "{winners:?}");
    let wins = |token: &str| winners.values().filter(|won| token.contains(won[0])).count();
    assert!(wins(one) > 0 && wins(two) > 0, "there was no race: {} and {}", wins(one), wins(two));
    // Each holds exactly what it won.
    for token in [one, two] {
        let held = queue.ok(token, "GET", "containers/current?limit=1000", Value::Null).await;
        assert_eq!(held["items_available"].as_u64(), Some(wins(token) as u64));
    }
    let filters = "containers?limit=0&filters=[[%22state%22,%22=%22,%22Locked%22]]";
    let locked = queue.ok(ADMIN_TOKEN, "GET", filters, Value::Null).await;
    assert_eq!(locked["items_available"].as_u64(), Some(CONTAINERS as u64));
}
