//! Flags of `jobs launch` that override the resources of a file.

use windlass_api::managed_jobs::Overrides;

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Overrides for every task of the file")]
pub(crate) struct JobResourceArgs {
    /// GPUs of each node, such as `H100:8`
    #[arg(long, value_name = "NAME[:N]")]
    gpus: Option<String>,
    /// CPUs of each node
    #[arg(long, value_name = "N[+]")]
    cpus: Option<String>,
    /// Memory of each node, in GB
    #[arg(long, value_name = "GB[+]")]
    memory: Option<String>,
    /// Number of nodes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    num_nodes: Option<u32>,
    /// Use spot instances, which may be preempted
    #[arg(long, overrides_with = "no_use_spot")]
    use_spot: bool,
    /// Use on-demand instances
    #[arg(long, overrides_with = "use_spot")]
    no_use_spot: bool,
    /// Location, as `cloud/region/zone`
    #[arg(long, value_name = "PLACE")]
    infra: Option<String>,
    /// Recovery strategy: `EAGER_NEXT_REGION`, `FAILOVER` or `NONE`; or a map, `{strategy: …, max_restarts_on_errors:
    /// 3}`
    #[arg(long, value_name = "HOW")]
    job_recovery: Option<String>,
    /// Time by which the job must be done, such as `48h`; or a map, `{within: 48h, work: 30h}`
    #[arg(long, value_name = "WHEN")]
    deadline: Option<String>,
}

impl JobResourceArgs {
    pub(super) fn overrides(&self) -> Overrides {
        let spot = (self.use_spot || self.no_use_spot).then_some(self.use_spot);
        Overrides {
            gpus: self.gpus.clone(),
            cpus: self.cpus.clone(),
            memory: self.memory.clone(),
            num_nodes: self.num_nodes,
            use_spot: spot,
            infra: self.infra.clone(),
            job_recovery: self.job_recovery.clone(),
            deadline: self.deadline.clone(),
        }
    }
}
