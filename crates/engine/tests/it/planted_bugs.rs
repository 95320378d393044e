//! The faults compiled in on purpose do what they say. Run one test per process: the switch is global.

use std::future::pending;

use tokio::time::sleep;
use windlass_planted_bugs::{Bug, plant};

use crate::toy::{Lab, What, secs, standard};

#[tokio::test(start_paused = true)]
async fn a_heartbeat_that_stops_renewing_lets_two_hold_one_row() {
    plant(Some(Bug::HeartbeatStopsRenewing));
    let lab = Lab::new(1);
    let (one, two) = (lab.way(), lab.way());
    let _first = lab.start(&one, lab.toy(&one).acting(|_| pending()), standard());
    sleep(secs(1)).await;
    let _second = lab.start(&two, lab.toy(&two), standard());
    lab.until(secs(40), "taken by the second", |lab| lab.journal.count(What::Started) == 2).await;
    assert_eq!(lab.journal.count(What::Dropped), 0, "while the first still works on it");
    plant(None);
}
