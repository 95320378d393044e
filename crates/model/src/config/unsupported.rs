//! Settings of a configuration that windlass does not support.
//!
//! Such a file is valid elsewhere. A setting that is essential is a refusal; one that can be ignored without harm is a
//! warning, which clients show before they ask for confirmation. No setting is dropped silently.

use std::collections::BTreeSet;

use super::{
    Configuration,
    error::{Code, Diagnosis, SourceSpan},
    gateway::{Certificate, Gateway},
    name::ResourceReference,
    profile::{InstanceSelector, ProfileProperties, Provisioning},
    run::{self, Run},
    service::Service,
    traffic::{GatewayChoice, Model},
    yaml::Node,
};
use crate::{plan::execution_mode::PLAIN_PROCESS_IMAGE, resources::ResourcesSpec};

/// Local port that clients send for a service if the user chose none.
const LOCAL_PORT: u16 = 80;

/// Context that the configuration is applied in, as far as it is known.
#[derive(Clone, Copy, Default)]
pub struct ReviewContext<'a> {
    /// Tree that the configuration was parsed from, for positions.
    pub node: Option<&'a Node>,
    /// Project that the configuration is applied in.
    pub project: Option<&'a str>,
    /// Properties of the run merged with its profile; those of the configuration if absent.
    pub properties: Option<&'a ProfileProperties>,
    /// Resources of other projects that the project may use; none if absent.
    pub imports: Option<&'a ImportedResources>,
}

/// Fleets and gateways of other projects that are exported to a project.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportedResources {
    pub fleets: BTreeSet<ResourceReference>,
    pub gateways: BTreeSet<ResourceReference>,
}

/// Unsupported settings, and settings without effect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SupportReview {
    pub refusals: Vec<Diagnosis>,
    pub warnings: Vec<Diagnosis>,
}

/// Finds all settings that would otherwise be dropped.
pub fn review(configuration: &Configuration, context: ReviewContext<'_>) -> SupportReview {
    let mut found = Reviewer { context, result: SupportReview::default() };
    match configuration {
        Configuration::Task(task) => {
            found.run(&task.run, &task.profile);
            found.groups(&task.run, task.groups.is_some());
        }
        Configuration::Service(service) => {
            found.run(&service.run, &service.profile);
            found.groups(&service.run, service.groups.is_some());
            found.single_nodes(&service.profile);
            found.service(service);
        }
        Configuration::DevEnvironment(dev) => {
            found.run(&dev.run, &dev.profile);
            found.single_nodes(&dev.profile);
            if dev.version.is_some() {
                let message = "`version` has no effect: the IDE installs what it needs when it connects";
                found.warn("version", message);
            }
        }
        Configuration::Fleet(fleet) => {
            found.provisioning(&fleet.provisioning);
            if fleet.provisioning.retry.is_some() {
                let message = "`retry` of a fleet has no effect: missing instances are always retried";
                found.warn("retry", message);
            }
            if fleet.ssh_config.is_some() && fleet.resources.is_some() {
                let message =
                    "`resources` has no effect with `ssh_config`: the resources of a host are fixed";
                found.warn("resources", message);
            }
        }
        Configuration::Gateway(gateway) => found.gateway(gateway),
        Configuration::Volume(_) => {}
    }
    found.result
}

/// Reviews a profile, before it is merged into a run.
pub fn review_profile(properties: &ProfileProperties) -> SupportReview {
    let mut found = Reviewer { context: ReviewContext::default(), result: SupportReview::default() };
    found.provisioning(&properties.provisioning);
    found.result
}

struct Reviewer<'a> {
    context: ReviewContext<'a>,
    result: SupportReview,
}

impl Reviewer<'_> {
    fn diagnosis(&self, path: &str, message: &str) -> Diagnosis {
        let key = path.split(['.', '[']).next().unwrap_or(path);
        let span = self.context.node.map_or(SourceSpan::NONE, |node| node.key_span(key));
        Diagnosis::new(Code::Unsupported, span, message).at(path)
    }

    fn refuse(&mut self, path: &str, message: &str, hint: &str) {
        let refusal = self.diagnosis(path, message).hint(hint);
        self.result.refusals.push(refusal);
    }

    fn warn(&mut self, path: &str, message: &str) {
        let warning = self.diagnosis(path, message);
        self.result.warnings.push(warning);
    }

    fn run(&mut self, run: &Run, own: &ProfileProperties) {
        if run.dstack {
            let message = "`dstack: true` is not supported: jobs have no access to the server";
            self.refuse("dstack", message, "store a user token in a secret, and reference it in `env`");
        }
        if run.home_dir != run::HOME_DIR {
            self.warn("home_dir", "`home_dir` has no effect: a job uses the home directory of its user");
        }
        self.plain_process(run);
        let properties = self.context.properties.unwrap_or(own);
        let imports = self.context.imports;
        let is_imported = |fleet| imports.is_some_and(|imports| imports.fleets.contains(fleet));
        for (index, fleet) in properties.fleets.iter().flatten().enumerate() {
            if is_imported(fleet) {
                continue;
            }
            self.reference(&format!("fleets[{index}]"), "fleet", fleet);
        }
        for (index, selector) in properties.instances.iter().flat_map(|list| &list.0).enumerate() {
            match selector {
                InstanceSelector::Member { fleet, .. } => {
                    self.reference(&format!("instances[{index}].fleet"), "fleet", fleet);
                }
                InstanceSelector::Name { .. } | InstanceSelector::Hostname { .. } => {}
            }
        }
        self.provisioning(&properties.provisioning);
    }

    /// Warns about settings of containers in a run that is a plain process.
    fn plain_process(&mut self, run: &Run) {
        if run.image.as_deref() != Some(PLAIN_PROCESS_IMAGE) {
            return;
        }
        if run.privileged {
            let message =
                "`privileged` has no effect with `image: none`: the host decides what its processes may do";
            self.warn("privileged", message);
        }
        if run.registry_auth.is_some() {
            self.warn(
                "registry_auth",
                "`registry_auth` has no effect with `image: none`: no image is pulled",
            );
        }
    }

    /// Warns about `resources` next to `groups`: each group has its own.
    fn groups(&mut self, run: &Run, has_groups: bool) {
        if has_groups && run.resources != ResourcesSpec::default() {
            self.warn("resources", "`resources` has no effect with `groups`: set it in the groups");
        }
    }

    /// Warns about settings for multi-node runs: only tasks have several nodes.
    fn single_nodes(&mut self, own: &ProfileProperties) {
        let properties = self.context.properties.unwrap_or(own);
        let set = [
            ("startup_order", properties.startup_order.is_some()),
            ("stop_criteria", properties.stop_criteria.is_some()),
        ];
        for (key, _) in set.into_iter().filter(|(_, is_set)| *is_set) {
            self.warn(key, &format!("`{key}` has no effect: only tasks can have several nodes"));
        }
    }

    fn provisioning(&mut self, provisioning: &Provisioning) {
        if provisioning.backend_options.as_ref().is_some_and(|options| !options.0.is_empty()) {
            let message =
                "`backend_options` has no effect: it applies to vastai, which windlass does not support";
            self.warn("backend_options", message);
        }
    }

    /// Refuses a reference to another project, which must not resolve to a resource of this one.
    fn reference(&mut self, path: &str, what: &str, reference: &ResourceReference) {
        let (Some(named), Some(own)) = (&reference.project, self.context.project) else { return };
        if named != own {
            let message = format!(
                "`{named}/{0}` is a {what} of another project that is not exported to `{own}`",
                reference.name
            );
            let hint = format!(
                "remove `{named}/` to use the {what} of `{own}`, or have an admin of `{named}` run `windlass export \
                 create NAME --{what} {0} --importer {own}`",
                reference.name
            );
            self.refuse(path, &message, &hint);
        }
    }

    fn service(&mut self, service: &Service) {
        // Clients send 80 if the user chose none.
        if service.port.0.local_port.is_some_and(|port| port != LOCAL_PORT) {
            let message = "the local part of `port` has no effect: a service is reached at its URL";
            self.warn("port", message);
        }
        if let Some(GatewayChoice::Named(gateway)) = &service.gateway {
            let is_imported = self.context.imports.is_some_and(|imports| imports.gateways.contains(gateway));
            if !is_imported {
                self.reference("gateway", "gateway", gateway);
            }
        }
        if let Some(Model::Tgi { .. }) = &service.model {
            let message = "`format: tgi` is not supported: the model endpoint supports only the OpenAI API";
            self.refuse("model.format", message, "use `format: openai`; TGI serves the OpenAI API at `/v1`");
        }
        for (index, group) in service.groups.iter().flatten().enumerate() {
            if group.router.is_some() {
                let message =
                    "`router` is not supported: requests are distributed to the replicas of all groups";
                let hint = "run the router as one service, and the workers as another service that it calls";
                self.refuse(&format!("groups[{index}].router"), message, hint);
            }
        }
    }

    fn gateway(&mut self, gateway: &Gateway) {
        const SERVED: &str = "run `windlass gateway serve` on one of your hosts";
        if gateway.instance_type.is_some() {
            let message = "`instance_type` is not supported: windlass does not create instances for gateways";
            self.refuse("instance_type", message, SERVED);
        }
        if gateway.load_balancer.is_some() {
            let message = "`load_balancer` is not supported: windlass does not create load balancers";
            self.refuse("load_balancer", message, SERVED);
        }
        if !gateway.public_ip {
            self.warn("public_ip", "`public_ip` has no effect: a gateway uses the addresses of its host");
        }
        let of_cloud = match &gateway.certificate {
            Some(Certificate::Acm { .. }) => Some("acm"),
            Some(Certificate::GcpCm { .. }) => Some("gcp-cm"),
            Some(Certificate::LetsEncrypt | Certificate::Files { .. }) | None => None,
        };
        if let Some(kind) = of_cloud {
            let message =
                format!("a certificate of type `{kind}` is not supported: it can be used only in its cloud");
            let hint =
                "use `type: lets-encrypt`, `type: files`, or `certificate: null` behind your own proxy";
            self.refuse("certificate.type", &message, hint);
        }
    }
}
