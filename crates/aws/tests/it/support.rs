//! Shared test code: settings, orders, and a backend without SSH.

use std::{collections::BTreeMap, sync::Arc};

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use windlass_aws::{AwsProvider, Settings};
use windlass_backend::{
    AgentEndpoint, Backend, BackendError, BackendFinding, BackendFuture, BackendInstance, DeleteProgress,
    Enrolment, InstanceRequest, InstanceSource, InstanceState,
    machines::{MachineProvider, MachineRequest, MachineState},
    volumes::VolumeBackend,
};
use windlass_model::{id::InstanceId, plan::offers::Offer};
use windlass_testkit::moto::{IMAGE_PARAMETER, MotoServer};

pub(crate) const REGION: &str = "us-east-1";
pub(crate) const USER_DATA: &str = "#!/bin/sh\necho started\n";

pub(crate) fn uuid() -> uuid::Uuid {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).unwrap();
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

pub(crate) fn settings(moto: &MotoServer, more: Value) -> Settings {
    let mut all = json!({
        "creds": {"type": "access_key", "access_key": "AKIAEXAMPLE", "secret_key": "s"},
        "regions": [REGION], "endpoint": moto.url(), "instance_types": ["t3.micro", "g5.xlarge"],
        "os_images": {"cpu": IMAGE_PARAMETER, "nvidia": IMAGE_PARAMETER}, "tags": {"team": "ml"},
    });
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let settings: Settings = serde_json::from_value(all).unwrap();
    settings.validated().unwrap()
}

/// Opens the provider as a new server would.
pub(crate) fn provider(moto: &MotoServer, more: Value) -> AwsProvider {
    AwsProvider::new(settings(moto, more))
}

pub(crate) fn order(offer: &Offer) -> InstanceRequest {
    let instance = InstanceId(uuid());
    InstanceRequest {
        instance,
        name: "fleet-0".into(),
        want: InstanceSource::Offer(Box::new(offer.clone())),
        enrolment: Enrolment {
            instance,
            credential_sha256: "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08".into(),
            server_key: "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=".into(),
            gateway_key: None,
        },
        tags: BTreeMap::from([("owner".to_owned(), "me".to_owned())]),
        env: BTreeMap::new(),
        alternatives: Vec::new(),
        container: None,
        login: None,
    }
}

pub(crate) fn offer_in(offers: &[Offer], instance_type: &str, zone: &str, spot: bool) -> Offer {
    let is_wanted = |offer: &&Offer| {
        offer.instance_type == instance_type && offer.zones == [zone] && offer.host.spot == spot
    };
    offers.iter().find(is_wanted).unwrap_or_else(|| panic!("no {instance_type} in {zone}")).clone()
}

pub(crate) async fn create(provider: &AwsProvider, order: &InstanceRequest) -> Result<String, BackendError> {
    let InstanceSource::Offer(offer) = &order.want else { panic!("{order:?}") };
    provider.create(&MachineRequest { order, offer, user_data: USER_DATA.to_owned() }).await
}

/// Machine as the server has stored it.
pub(crate) fn machine(id: &str) -> BackendInstance {
    BackendInstance {
        id: id.to_owned(),
        reach: None,
        hostname: None,
        internal_ip: None,
        has: None,
        agent_version: None,
        memo: json!({ "region": REGION }),
    }
}

pub(crate) async fn find(provider: &AwsProvider, order: &InstanceRequest) -> MachineState {
    provider.find(order, &machine("")).await.unwrap()
}

/// Deletes a machine and waits until nothing of it is left.
pub(crate) async fn delete(provider: &AwsProvider, order: &InstanceRequest) {
    while provider.delete(order, None).await.unwrap() == DeleteProgress::InProgress {}
}

/// The provider as a backend whose machines can be called as soon as they have an address.
pub(crate) struct WithoutSsh(pub(crate) AwsProvider);

impl Backend for WithoutSsh {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        self.0.offers()
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        Box::pin(async move { Ok(machine(&create(&self.0, order).await?)) })
    }

    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        Box::pin(async move {
            Ok(match self.0.find(order, machine).await? {
                MachineState::Unknown => InstanceState::Unknown,
                MachineState::Starting { .. } => InstanceState::Starting(machine.clone()),
                MachineState::Gone { message } => InstanceState::Gone { message },
                MachineState::Running(address) => InstanceState::Running(BackendInstance {
                    reach: Some(AgentEndpoint::Ssh { socket: address.host.clone() }),
                    ..machine.clone()
                }),
            })
        })
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        self.0.delete(order, machine.map(|machine| machine.id.as_str()))
    }

    fn check(&self) -> BoxFuture<'_, Vec<BackendFinding>> {
        self.0.check()
    }

    fn volumes(&self) -> Option<&dyn VolumeBackend> {
        self.0.volumes()
    }
}

pub(crate) fn without_ssh(moto: &MotoServer) -> Arc<dyn Backend> {
    Arc::new(WithoutSsh(provider(moto, json!({}))))
}
