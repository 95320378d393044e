//! What dstack's client wants of an answer before it reads it at all: required fields, version 4 of
//! UUIDs, closed sets of words, times in UTC.

use serde_json::Value;

#[track_caller]
fn has(value: &Value, model: &str, fields: &str) {
    let object = value.as_object().unwrap_or_else(|| panic!("{model} is no object: {value}"));
    for field in fields.split_whitespace() {
        assert!(object.get(field).is_some_and(|value| !value.is_null()), "{model} lacks `{field}`: {value}");
    }
}

#[track_caller]
fn v4(value: &Value) {
    let id: uuid::Uuid = value.as_str().unwrap().parse().unwrap();
    assert_eq!(id.get_version_num(), 4, "{id}");
    assert_eq!(value.as_str().unwrap(), id.to_string(), "lower case, with dashes");
}

#[track_caller]
fn time(value: &Value) {
    let text = value.as_str().unwrap_or_else(|| panic!("{value} is no time"));
    assert!(text.len() >= 20 && text.ends_with('Z') && text.as_bytes()[10] == b'T', "{text}");
}

#[track_caller]
fn one_of(value: &Value, words: &str) {
    assert!(words.split_whitespace().any(|word| value == word), "{value} is none of {words}");
}

#[track_caller]
pub(crate) fn run(value: &Value) {
    has(
        value,
        "Run",
        "id project_name user submitted_at last_processed_at status run_spec jobs status_message cost",
    );
    v4(&value["id"]);
    time(&value["submitted_at"]);
    time(&value["last_processed_at"]);
    one_of(&value["status"], "pending submitted provisioning running terminating terminated failed done");
    has(&value["run_spec"], "RunSpec", "configuration");
    has(&value["run_spec"]["configuration"], "configuration", "type");
    for job in value["jobs"].as_array().unwrap() {
        has(job, "Job", "job_spec job_submissions");
        job_spec(&job["job_spec"]);
        let submissions = job["job_submissions"].as_array().unwrap();
        assert!(!submissions.is_empty(), "clients read the last submission of every job");
        for submission in submissions {
            has(submission, "JobSubmission", "id submitted_at last_processed_at status status_message");
            v4(&submission["id"]);
            assert!(submission["submission_num"].is_i64());
            time(&submission["submitted_at"]);
        }
    }
}

#[track_caller]
pub(crate) fn job_spec(value: &Value) {
    has(value, "JobSpec", "job_name commands env image_name requirements app_specs");
    assert!(value["job_num"].is_i64() && value["app_specs"].is_array());
    has(&value["requirements"], "Requirements", "resources");
    assert!(value["ssh_key"].is_null(), "a job's key is nobody's business");
}

#[track_caller]
pub(crate) fn run_plan(value: &Value) {
    has(value, "RunPlan", "project_name user run_spec effective_run_spec job_plans action");
    one_of(&value["action"], "create update");
    let plans = value["job_plans"].as_array().unwrap();
    assert!(!plans.is_empty());
    for plan in plans {
        has(plan, "JobPlan", "job_spec offers");
        assert!(plan["total_offers"].is_i64());
        job_spec(&plan["job_spec"]);
    }
    if !value["current_resource"].is_null() {
        run(&value["current_resource"]);
    }
}

#[track_caller]
pub(crate) fn fleet(value: &Value) {
    has(value, "Fleet", "id name project_name spec created_at status instances");
    v4(&value["id"]);
    time(&value["created_at"]);
    one_of(&value["status"], "submitted active terminating terminated failed");
    has(&value["spec"], "FleetSpec", "configuration profile");
    value["instances"].as_array().unwrap().iter().for_each(instance);
}

#[track_caller]
pub(crate) fn instance(value: &Value) {
    has(value, "Instance", "id project_name name status created");
    assert!(value["instance_num"].is_i64());
    one_of(&value["status"], "pending provisioning idle busy terminating terminated");
    one_of(&value["health_status"], "healthy warning failure");
    if !value["backend"].is_null() {
        one_of(&value["backend"], "remote kubernetes slurm aws gcp azure");
    }
    time(&value["created"]);
}

#[track_caller]
pub(crate) fn volume(value: &Value) {
    has(value, "Volume", "id name user project_name configuration created_at last_processed_at status");
    assert!(value["external"].is_boolean() && value["deleted"].is_boolean());
    one_of(&value["status"], "submitted provisioning active failed");
}

#[track_caller]
pub(crate) fn gateway(value: &Value) {
    has(value, "Gateway", "id name project_name configuration created_at status");
    assert!(value["default"].is_boolean());
    one_of(&value["status"], "submitted provisioning running failed");
}

#[track_caller]
pub(crate) fn user(value: &Value) {
    has(value, "User", "id username global_role permissions");
    assert!(value["active"].is_boolean() && value["permissions"]["can_create_projects"].is_boolean());
    v4(&value["id"]);
    one_of(&value["global_role"], "admin user");
}

#[track_caller]
pub(crate) fn project(value: &Value) {
    has(value, "Project", "project_id project_name owner backends members");
    v4(&value["project_id"]);
    user(&value["owner"]);
    for member in value["members"].as_array().unwrap() {
        user(&member["user"]);
        one_of(&member["project_role"], "admin manager user");
        assert!(member["permissions"]["can_manage_ssh_fleets"].is_boolean());
    }
}
