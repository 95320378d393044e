//! Many tasks, few GPUs, calls in any order, and a shim that is killed between them.

use proptest::prelude::*;

use super::{fake::exit, *};

#[derive(Clone, Copy, Debug)]
enum ShimAction {
    Submit(u128, i64),
    Terminate(u128),
    Exit(u128),
    Remove(u128),
    Kill,
}

fn actions() -> impl Strategy<Value = Vec<ShimAction>> {
    let one = prop_oneof![
        4 => (1..8u128, 0..4i64).prop_map(|(n, gpus)| ShimAction::Submit(n, gpus)),
        2 => (1..8u128).prop_map(ShimAction::Terminate),
        2 => (1..8u128).prop_map(ShimAction::Exit),
        1 => (1..8u128).prop_map(ShimAction::Remove),
        1 => Just(ShimAction::Kill),
    ];
    prop::collection::vec(one, 1..30)
}

async fn run_actions(env: &mut TestHost, moves: &[ShimAction]) {
    let mut calls = tokio::task::JoinSet::new();
    for step in moves {
        let tasks = Arc::clone(env.tasks());
        match *step {
            ShimAction::Submit(n, gpus) => {
                let mut spec = spec(n);
                spec.gpu = gpus;
                calls.spawn(async move { tasks.submit(spec, Some(1)).await.is_ok() });
            }
            ShimAction::Terminate(n) => {
                calls.spawn(async move {
                    tasks.terminate(id(n), terminate_request("x", 0), Some(1)).await.is_ok()
                });
            }
            ShimAction::Remove(n) => {
                calls.spawn(async move { tasks.remove(id(n), Some(1)).await.is_ok() });
            }
            ShimAction::Exit(n) => {
                let runs = env
                    .fake
                    .0
                    .lock()
                    .containers
                    .get(&id(n))
                    .is_some_and(|c| c.state == crate::shim::runtime::FoundState::Running);
                if runs {
                    env.fake.end(id(n), exit(0));
                }
            }
            ShimAction::Kill => env.restart().await,
        }
        // Let some of it happen before the next call.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
    // A kill interrupts calls; those that still wait return the present state.
    calls.abort_all();
    while calls.join_next().await.is_some() {}
    env.restart().await;
    for n in 1..8 {
        if env.tasks().info(id(n)).is_some() {
            env.tasks().terminate(id(n), terminate_request("x", 0), Some(1)).await.unwrap();
            env.wait_for_status(id(n), TaskStatus::Terminated).await;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn g1_a2_no_sequence_of_calls_and_kills_assigns_a_gpu_to_two_tasks(moves in actions()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut env = TestHost::new("g1").await;
            run_actions(&mut env, &moves).await;
            env.check_empty();
        });
    }
}
