//! Tests of the planted bugs. Run one test per process: the switch is global.

use std::future::pending;

use tokio::time::sleep;
use windlass_planted_bugs::{Bug, plant};

use crate::support::{PassEvent, TestEnv, secs, standard_settings};

#[tokio::test(start_paused = true)]
async fn planted_heartbeat_bug_lets_two_replicas_hold_one_row() {
    plant(Some(Bug::HeartbeatStopsRenewing));
    let lab = TestEnv::new(1);
    let (one, two) = (lab.new_store(), lab.new_store());
    let _first = lab.start(&one, lab.pipeline(&one).with_act(|_| pending()), standard_settings());
    sleep(secs(1)).await;
    let _second = lab.start(&two, lab.pipeline(&two), standard_settings());
    lab.wait_until(secs(40), "taken by the second", |lab| lab.journal.count(PassEvent::Started) == 2).await;
    assert_eq!(lab.journal.count(PassEvent::Dropped), 0, "while the first still works on it");
    plant(None);
}
