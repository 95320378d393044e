//! Mock cloud: behaviour as in its script.

use windlass_api::agent::shim::TaskStatus;
use windlass_backend::{
    Backend, BackendError, InstanceState,
    mock::{MockCloud, script::MockScript},
    volumes::{AttachmentState, VolumeBackend, VolumeRequest},
};
use windlass_model::id::VolumeId;
use windlass_testkit::{TempDir, temp_dir};

use crate::support::{StopOnDrop, agent, connect, order, submit, uuid, wait_until};

fn cloud(dir: &TempDir, script: &str) -> MockCloud {
    MockCloud::new(MockScript::parse(script).unwrap(), dir.path(), Some(agent().path().to_owned()))
}

#[tokio::test]
async fn mock_cloud_reports_no_capacity_as_often_as_scripted_across_restarts() {
    let dir = temp_dir("mock").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let script = "offers: [{instance_type: a, price: 1, cpus: 4, memory_gb: 16, no_capacity: 2}]";
    for _ in 0..2 {
        let cloud = cloud(&dir, script);
        let error = cloud.create(&order(&cloud, 1).await).await.unwrap_err();
        assert!(matches!(error, BackendError::NoCapacity { .. }), "{error:?}");
    }
    let cloud = cloud(&dir, script);
    let order = order(&cloud, 1).await;
    cloud.create(&order).await.unwrap();
    cloud.delete(&order, None).await.unwrap();
}

#[tokio::test]
async fn a_retried_create_finds_the_instance_of_the_lost_response() {
    let dir = temp_dir("mock").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let cloud =
        cloud(&dir, "offers: [{instance_type: a, price: 1, cpus: 4, memory_gb: 16, lost_answers: 1}]");
    let order = order(&cloud, 1).await;
    let error = cloud.create(&order).await.unwrap_err();
    assert!(matches!(error, BackendError::Unavailable { .. }), "{error:?}");
    assert_eq!(std::fs::read_dir(dir.path().join("machines")).unwrap().count(), 1);
    cloud.create(&order).await.unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("machines")).unwrap().count(), 1);
    cloud.delete(&order, None).await.unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("machines")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_preempted_instance_is_gone_with_its_jobs() {
    let dir = temp_dir("mock").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let script =
        "{runtime: process, offers: [{instance_type: a, price: 1, cpus: 4, memory_gb: 16, spot: true}]}";
    let cloud = cloud(&dir, script);
    let order = order(&cloud, 1).await;
    let machine = cloud.create(&order).await.unwrap();
    let shim = connect(&machine).await;
    let task = submit(&shim, &order, 1, "none").await;
    wait_until(&shim, task, TaskStatus::Running).await;
    std::fs::create_dir_all(dir.path().join("preempt")).unwrap();
    std::fs::write(dir.path().join("preempt").join(order.instance.to_string()), "").unwrap();
    assert!(matches!(cloud.find(&order, &machine).await.unwrap(), InstanceState::Gone { .. }));
    assert!(shim.tasks().await.is_err(), "its agent ended with it");
    let error = cloud.create(&order).await.unwrap_err();
    assert!(matches!(error, BackendError::NoCapacity { .. }), "it does not come back: {error:?}");
    cloud.delete(&order, Some(&machine)).await.unwrap();
}

#[tokio::test]
async fn volumes_fail_to_attach_and_hang_on_detach_as_scripted() {
    let dir = temp_dir("mock").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let script = "{offers: [{instance_type: a, price: 1, cpus: 4, memory_gb: 16}], \
                   volumes: {price_gb: 0.1, attach_fails: 1, detach_hangs: true}}";
    let cloud = cloud(&dir, script);
    let (one, two) = (order(&cloud, 1).await, order(&cloud, 1).await);
    let (here, there) = (cloud.create(&one).await.unwrap(), cloud.create(&two).await.unwrap());
    let wanted = VolumeRequest {
        volume: VolumeId(uuid()),
        name: "data".into(),
        region: "nowhere".into(),
        zone: None,
        size_gb: Some(10.0),
        external: None,
    };
    let made = cloud.make(&wanted).await.unwrap();
    assert_eq!(cloud.make(&wanted).await.unwrap(), made);
    assert_eq!((made.price, made.ready), (Some(1.0), true));
    assert!(cloud.attach(&made.id, &here).await.is_err());
    assert!(matches!(cloud.attach(&made.id, &here).await.unwrap(), AttachmentState::Yes(_)));
    assert!(cloud.attach(&made.id, &there).await.is_err(), "it is attached elsewhere");
    assert!(cloud.remove(&wanted, &made.id).await.is_err(), "it is attached");
    cloud.detach(&made.id, &here, false).await.unwrap();
    assert!(matches!(cloud.attached(&made.id, &here).await.unwrap(), AttachmentState::Yes(_)), "it hangs");
    cloud.detach(&made.id, &here, true).await.unwrap();
    assert_eq!(cloud.attached(&made.id, &here).await.unwrap(), AttachmentState::No);
    cloud.remove(&wanted, &made.id).await.unwrap();
    assert_eq!(cloud.get(&wanted, &made.id).await.unwrap(), None);
    for order in [one, two] {
        cloud.delete(&order, None).await.unwrap();
    }
}
