//! The provider against moto, with and without misfortunes.

use serde_json::json;
use windlass_backend::{
    Backend as _, BackendError, DeleteProgress,
    conformance::check_backend,
    machines::{MachineProvider as _, MachineState},
    volumes::{AttachmentState, VolumeBackend as _, VolumeRequest},
};
use windlass_model::{id::VolumeId, plan::offers::Availability};
use windlass_testkit::moto::MotoServer;

use crate::support::{
    REGION, USER_DATA, WithoutSsh, create, delete, find, machine, offer_in, order, provider, uuid,
    without_ssh,
};

#[tokio::test]
async fn aws_passes_the_conformance_checks() {
    let moto = MotoServer::start();
    let open = || without_ssh(&moto);
    let offer = offer_in(&open().offers().await.unwrap(), "t3.micro", "us-east-1a", false);
    check_backend(&open, &order(&offer)).await;
    assert_eq!(provider(&moto, json!({})).list().await.unwrap(), []);
}

#[tokio::test]
async fn aws_passes_the_conformance_checks_while_calls_are_refused_answers_are_lost_and_lists_are_late() {
    let moto = MotoServer::start();
    let open = || without_ssh(&moto);
    let offer = offer_in(&open().offers().await.unwrap(), "t3.micro", "us-east-1a", false);
    moto.control(&json!({"throttle": 2, "lost": 2, "late": 2, "pending": 3}));
    check_backend(&open, &order(&offer)).await;
    moto.control(&json!({}));
    assert_eq!(provider(&moto, json!({})).list().await.unwrap(), []);
    assert_eq!(moto.started().len(), 1, "no second machine was ever created");
}

#[tokio::test]
async fn offers_have_the_hardware_of_aws_and_are_in_each_zone_of_both_markets() {
    let moto = MotoServer::start();
    let offers = provider(&moto, json!({})).offers().await.unwrap();
    let gpu = offer_in(&offers, "g5.xlarge", "us-east-1a", false);
    assert_eq!((gpu.host.cpus, gpu.host.memory_mib, gpu.host.disk_mib), (4, 16_384, 100 * 1024));
    assert_eq!((gpu.host.gpus.len(), gpu.host.gpus[0].name.as_str()), (1, "A10G"));
    assert_eq!(gpu.host.gpus[0].memory_mib, 24 * 1024, "{gpu:?}");
    assert_eq!((gpu.region.as_str(), gpu.price.as_dollars()), (REGION, 1.006));
    let spot = offer_in(&offers, "g5.xlarge", "us-east-1a", true);
    assert!(spot.price < gpu.price, "{spot:?}");
    assert!(offers.iter().all(|offer| ["t3.micro", "g5.xlarge"].contains(&offer.instance_type.as_str())));
}

#[tokio::test]
async fn a_catalogue_gives_prices_where_the_table_has_none() {
    let moto = MotoServer::start();
    let file = moto.dir().join("prices.csv");
    std::fs::write(&file, "instance_name,location,price,spot\nt3.micro,eu-west-1,0.0114,False\n").unwrap();
    let more = json!({"regions": ["eu-west-1"], "prices": file});
    let offers = provider(&moto, more).offers().await.unwrap();
    let of = |name: &str| offer_in(&offers, name, "eu-west-1a", false).price;
    assert_eq!(of("t3.micro").as_dollars(), 0.0114);
    assert!(!of("g5.xlarge").is_known(), "{}", of("g5.xlarge"));
    assert!(of("g5.xlarge") > of("t3.micro"), "an offer without a price sorts last");
    // One that cannot be read leaves the offers.
    let unread = provider(&moto, json!({"regions": ["eu-west-1"], "prices": "/nonexistent"}));
    assert_eq!(unread.offers().await.unwrap().len(), offers.len());
}

#[tokio::test]
async fn a_machine_is_created_once_with_the_script_the_tags_and_the_market_of_its_offer() {
    let moto = MotoServer::start();
    let aws = provider(&moto, json!({}));
    let offers = aws.offers().await.unwrap();
    let request = order(&offer_in(&offers, "g5.xlarge", "us-east-1b", true));
    // Its answer is lost: the repeated call returns the same machine.
    moto.control(&json!({"lost": 1}));
    let id = create(&aws, &request).await.unwrap();
    assert_eq!(create(&provider(&moto, json!({})), &request).await.unwrap(), id);
    let started = moto.started();
    assert_eq!(started.len(), 1, "{started:?}");
    assert_eq!((started[0].id.as_str(), started[0].user_data.as_str()), (id.as_str(), USER_DATA));
    assert_eq!((started[0].zone.as_str(), started[0].market.as_str()), ("us-east-1b", "spot"));
    let listed = aws.list().await.unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!((&listed[0].id, &listed[0].instance), (&id, &request.instance.to_string()));
    let MachineState::Running(address) = find(&aws, &request).await else { panic!("it does not run") };
    assert_eq!(address.host, started[0].address);
    assert!(address.internal_ip.unwrap().starts_with("172.31."));
    delete(&aws, &request).await;
    assert!(matches!(find(&aws, &request).await, MachineState::Gone { .. }));
    assert_eq!(aws.list().await.unwrap(), []);
}

#[tokio::test]
async fn errors_of_a_creation_say_whether_another_offer_helps() {
    let moto = MotoServer::start();
    let aws = provider(&moto, json!({}));
    let offers = aws.offers().await.unwrap();
    let request = order(&offer_in(&offers, "g5.xlarge", "us-east-1a", false));
    moto.control(&json!({"full": ["g5.xlarge us-east-1a *"]}));
    let full = create(&aws, &request).await.unwrap_err();
    assert!(
        matches!(&full, BackendError::NoCapacity { message } if message.contains("InsufficientInstanceCapacity")),
        "{full}"
    );
    let next = order(&offer_in(&offers, "g5.xlarge", "us-east-1c", false));
    create(&aws, &next).await.unwrap();
    delete(&aws, &next).await;
    // A quota is one of the family and the market, and is shown for a while.
    moto.control(&json!({"quota": ["g5.* * on-demand"]}));
    let quota = create(&aws, &request).await.unwrap_err();
    assert!(matches!(&quota, BackendError::NoCapacity { message } if message.contains("quota")), "{quota}");
    let offers = aws.offers().await.unwrap();
    let availability = |name: &str, spot| offer_in(&offers, name, "us-east-1c", spot).availability;
    assert_eq!(availability("g5.xlarge", false), Availability::NoQuota);
    assert_eq!(availability("g5.xlarge", true), Availability::Unknown);
    assert_eq!(availability("t3.micro", false), Availability::Unknown);
    // What another attempt does not change is refused.
    moto.control(&json!({"denied": ["RunInstances"]}));
    let denied = create(&aws, &request).await.unwrap_err();
    assert!(matches!(denied, BackendError::Refused { .. }), "{denied}");
    moto.control(&json!({}));
    let wrong = provider(&moto, json!({"os_images": {"nvidia": {"name": "nothing-*"}}}));
    let wrong = create(&wrong, &request).await.unwrap_err();
    assert!(
        matches!(wrong, BackendError::Refused { .. }) && wrong.to_string().contains("no image"),
        "{wrong}"
    );
    let none = provider(&moto, json!({"os_images": {"nvidia": "/aws/service/nothing"}}));
    let none = create(&none, &request).await.unwrap_err();
    assert!(none.to_string().contains("no parameter `/aws/service/nothing`"), "{none}");
    assert_eq!(aws.list().await.unwrap(), []);
}

#[tokio::test]
async fn a_spot_machine_that_is_reclaimed_says_so() {
    let moto = MotoServer::start();
    let aws = provider(&moto, json!({}));
    let request = order(&offer_in(&aws.offers().await.unwrap(), "t3.micro", "us-east-1a", true));
    let id = create(&aws, &request).await.unwrap();
    assert!(matches!(find(&aws, &request).await, MachineState::Running(_)));
    moto.control(&json!({"interrupt": [id]}));
    let gone = find(&aws, &request).await;
    let MachineState::Gone { message } = gone else { panic!("{gone:?}") };
    assert!(message.contains("AWS reclaimed the spot machine"), "{message}");
    assert_eq!(aws.delete(&request, Some(&id)).await.unwrap(), DeleteProgress::Gone);
}

#[tokio::test]
async fn of_two_machines_of_one_instance_one_is_terminated() {
    let moto = MotoServer::start();
    let aws = provider(&moto, json!({}));
    let offers = aws.offers().await.unwrap();
    let first = order(&offer_in(&offers, "t3.micro", "us-east-1a", false));
    let elsewhere = order(&offer_in(&offers, "t3.micro", "us-east-1b", false));
    let second = windlass_backend::InstanceRequest { want: elsewhere.want, ..first.clone() };
    // The machine of the first attempt is not listed yet when the server tries the next zone.
    moto.control(&json!({"late": 1}));
    let kept = create(&aws, &first).await.unwrap();
    let extra = create(&aws, &second).await.unwrap();
    assert_ne!(kept, extra);
    moto.control(&json!({}));
    assert!(matches!(find(&aws, &first).await, MachineState::Running(_)));
    let left: Vec<String> = aws.list().await.unwrap().into_iter().map(|owned| owned.id).collect();
    assert_eq!(left.len(), 1, "{left:?}");
    delete(&aws, &first).await;
    assert_eq!(aws.list().await.unwrap(), []);
}

#[tokio::test]
async fn a_machine_that_is_not_listed_yet_is_deleted_all_the_same() {
    let moto = MotoServer::start();
    let aws = provider(&moto, json!({}));
    let request = order(&offer_in(&aws.offers().await.unwrap(), "t3.micro", "us-east-1a", false));
    // All answers are lost: nobody knows the machine's id, and it is listed late.
    moto.control(&json!({"lost": 100, "late": 3}));
    let error = create(&aws, &request).await.unwrap_err();
    assert!(matches!(error, BackendError::Unavailable { .. }), "{error}");
    assert_eq!(aws.delete(&request, None).await.unwrap(), DeleteProgress::InProgress);
    delete(&aws, &request).await;
    assert_eq!(aws.list().await.unwrap(), []);
    assert_eq!(moto.started().len(), 1);
    // With its id, a machine is terminated before it is listed.
    moto.control(&json!({"late": 1}));
    let request = order(&offer_in(&aws.offers().await.unwrap(), "t3.micro", "us-east-1a", false));
    let id = create(&aws, &request).await.unwrap();
    aws.delete(&request, Some(&id)).await.unwrap();
    moto.control(&json!({}));
    assert_eq!(aws.list().await.unwrap(), []);
}

#[tokio::test]
async fn a_volume_is_created_once_and_is_on_one_machine_at_a_time() {
    let moto = MotoServer::start();
    let aws = provider(&moto, json!({}));
    let offers = aws.offers().await.unwrap();
    let volume = VolumeRequest {
        volume: VolumeId(uuid()),
        name: "data".into(),
        region: REGION.into(),
        zone: Some("us-east-1b".into()),
        size_gb: Some(19.5),
        external: None,
    };
    let refusal = async |volume: VolumeRequest| aws.make(&volume).await.unwrap_err().to_string();
    let elsewhere = refusal(VolumeRequest { region: "mars-1".into(), ..volume.clone() }).await;
    assert!(
        elsewhere.contains("region `mars-1` is not configured; this backend has `us-east-1`"),
        "{elsewhere}"
    );
    let nowhere = refusal(VolumeRequest { zone: Some("us-east-1z".into()), ..volume.clone() }).await;
    assert!(nowhere.contains("zone `us-east-1z` cannot be used"), "{nowhere}");
    let missing =
        refusal(VolumeRequest { external: Some("vol-0123456789abcdef0".into()), ..volume.clone() }).await;
    assert!(missing.contains("no volume `vol-0123456789abcdef0`"), "{missing}");
    let made = aws.make(&volume).await.unwrap();
    assert_eq!((made.size_gb, made.zone.as_deref()), (Some(20.0), Some("us-east-1b")));
    assert_eq!(
        provider(&moto, json!({})).make(&volume).await.unwrap().id,
        made.id,
        "a repeat finds the same"
    );
    assert!(aws.get(&volume, &made.id).await.unwrap().unwrap().ready);

    let mut machines = Vec::new();
    for _ in 0..2 {
        let request = order(&offer_in(&offers, "t3.micro", "us-east-1b", false));
        let id = create(&aws, &request).await.unwrap();
        machines.push((request, machine(&id)));
    }
    let (one, two) = (&machines[0].1, &machines[1].1);
    let AttachmentState::Yes(at) = attached(&aws, &made.id, one).await else { panic!("not attached") };
    assert!(at.device_name.as_ref().unwrap().starts_with("/dev/sd"), "{at:?}");
    assert_eq!(aws.attach(&made.id, one).await.unwrap(), AttachmentState::Yes(at.clone()), "a repeat");
    let busy = aws.attach(&made.id, two).await.unwrap_err();
    assert!(busy.to_string().contains(&format!("is attached to {}", one.id)), "{busy}");
    let busy = aws.remove(&volume, &made.id).await.unwrap_err();
    assert!(busy.to_string().contains("still attached"), "{busy}");
    aws.detach(&made.id, one, false).await.unwrap();
    aws.detach(&made.id, one, true).await.unwrap();
    assert_eq!(aws.attached(&made.id, one).await.unwrap(), AttachmentState::No);
    assert!(matches!(attached(&aws, &made.id, two).await, AttachmentState::Yes(_)));
    for (request, _) in &machines {
        delete(&aws, request).await;
    }
    assert_eq!(aws.attached(&made.id, two).await.unwrap(), AttachmentState::No);
    // A volume that existed before is used, and left alone.
    let external =
        VolumeRequest { volume: VolumeId(uuid()), external: Some(made.id.clone()), ..volume.clone() };
    assert_eq!(aws.make(&external).await.unwrap().id, made.id);
    aws.remove(&external, &made.id).await.unwrap();
    assert!(aws.get(&external, &made.id).await.unwrap().is_some());
    aws.remove(&volume, &made.id).await.unwrap();
    aws.remove(&volume, &made.id).await.unwrap();
    assert_eq!(aws.get(&volume, &made.id).await.unwrap(), None);
}

async fn attached(
    aws: &windlass_aws::AwsProvider,
    id: &str,
    machine: &windlass_backend::BackendInstance,
) -> AttachmentState {
    match aws.attach(id, machine).await.unwrap() {
        AttachmentState::Coming => aws.attached(id, machine).await.unwrap(),
        state @ (AttachmentState::Yes(_) | AttachmentState::No) => state,
    }
}

#[tokio::test]
async fn a_check_names_each_missing_permission_and_what_is_not_there() {
    let moto = MotoServer::start();
    let problems = async |more: serde_json::Value| -> Vec<String> {
        let findings = WithoutSsh(provider(&moto, more)).check().await;
        findings.into_iter().filter_map(|one| Some(format!("{}: {}", one.what, one.problem?))).collect()
    };
    let images = json!({
        "cpu": windlass_testkit::moto::IMAGE_PARAMETER, "arm": windlass_testkit::moto::IMAGE_PARAMETER,
        "nvidia": windlass_testkit::moto::IMAGE_PARAMETER,
    });
    // moto has no capacity reservations.
    let all = problems(json!({"os_images": images})).await;
    assert_eq!(all.len(), 1, "{all:?}");
    assert!(all[0].starts_with("permission ec2:DescribeCapacityReservations"), "{all:?}");
    moto.control(&json!({"denied": ["RunInstances", "AttachVolume"]}));
    let denied = problems(json!({"os_images": images})).await.join("\n");
    assert!(
        denied.contains("permission ec2:RunInstances: it is missing; hint: permit `ec2:RunInstances`"),
        "{denied}"
    );
    assert!(denied.contains("permission ec2:AttachVolume, for volumes: it is missing"), "{denied}");
    moto.control(&json!({}));
    let missing = problems(json!({"vpc_name": "lab", "prices": "/nonexistent"})).await.join("\n");
    assert!(
        missing.contains("region us-east-1: region us-east-1 has no VPC with the name `lab`"),
        "{missing}"
    );
    assert!(missing.contains("image `arm`") && missing.contains("hint: set `os_images`"), "{missing}");
    assert!(missing.contains("on-demand prices: failed to read the prices in `/nonexistent`"), "{missing}");
    let nowhere = json!({"endpoint": "http://127.0.0.1:1"});
    let nowhere = problems(nowhere).await;
    assert!(nowhere.len() == 1 && nowhere[0].starts_with("credentials from `creds`"), "{nowhere:?}");
    assert!(moto.started().is_empty(), "a check creates nothing");
}
