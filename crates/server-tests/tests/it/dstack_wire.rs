//! Requirements of dstack's client for every response: required fields, UUIDs of version 4, closed sets of values,
//! times in UTC.

use serde_json::Value;

#[track_caller]
fn assert_fields(value: &Value, model: &str, fields: &str) {
    let object = value.as_object().unwrap_or_else(|| panic!("{model} is no object: {value}"));
    for field in fields.split_whitespace() {
        assert!(object.get(field).is_some_and(|value| !value.is_null()), "{model} lacks `{field}`: {value}");
    }
}

#[track_caller]
fn assert_uuid_v4(value: &Value) {
    let id: uuid::Uuid = value.as_str().unwrap().parse().unwrap();
    assert_eq!(id.get_version_num(), 4, "{id}");
    assert_eq!(value.as_str().unwrap(), id.to_string(), "lower case, with dashes");
}

#[track_caller]
fn assert_time(value: &Value) {
    let text = value.as_str().unwrap_or_else(|| panic!("{value} is no time"));
    assert!(text.len() >= 20 && text.ends_with('Z') && text.as_bytes()[10] == b'T', "{text}");
}

#[track_caller]
fn assert_one_of(value: &Value, words: &str) {
    assert!(words.split_whitespace().any(|word| value == word), "{value} is none of {words}");
}

#[track_caller]
pub(crate) fn assert_run(value: &Value) {
    assert_fields(
        value,
        "Run",
        "id project_name user submitted_at last_processed_at status run_spec jobs status_message cost",
    );
    assert_uuid_v4(&value["id"]);
    assert_time(&value["submitted_at"]);
    assert_time(&value["last_processed_at"]);
    assert_one_of(
        &value["status"],
        "pending submitted provisioning running terminating terminated failed done",
    );
    assert_fields(&value["run_spec"], "RunSpec", "configuration");
    assert_fields(&value["run_spec"]["configuration"], "configuration", "type");
    for job in value["jobs"].as_array().unwrap() {
        assert_fields(job, "Job", "job_spec job_submissions");
        assert_job_spec(&job["job_spec"]);
        let submissions = job["job_submissions"].as_array().unwrap();
        assert!(!submissions.is_empty(), "clients read the last submission of every job");
        for submission in submissions {
            assert_fields(
                submission,
                "JobSubmission",
                "id submitted_at last_processed_at status status_message",
            );
            assert_uuid_v4(&submission["id"]);
            assert!(submission["submission_num"].is_i64());
            assert_time(&submission["submitted_at"]);
        }
    }
}

#[track_caller]
pub(crate) fn assert_job_spec(value: &Value) {
    assert_fields(value, "JobSpec", "job_name commands env image_name requirements app_specs");
    assert!(value["job_num"].is_i64() && value["app_specs"].is_array());
    assert_fields(&value["requirements"], "Requirements", "resources");
    assert!(value["ssh_key"].is_null(), "a job's key is nobody's business");
}

#[track_caller]
pub(crate) fn assert_run_plan(value: &Value) {
    assert_fields(value, "RunPlan", "project_name user run_spec effective_run_spec job_plans action");
    assert_one_of(&value["action"], "create update");
    let plans = value["job_plans"].as_array().unwrap();
    assert!(!plans.is_empty());
    for plan in plans {
        assert_fields(plan, "JobPlan", "job_spec offers");
        assert!(plan["total_offers"].is_i64());
        assert_job_spec(&plan["job_spec"]);
    }
    if !value["current_resource"].is_null() {
        assert_run(&value["current_resource"]);
    }
}

#[track_caller]
pub(crate) fn assert_fleet(value: &Value) {
    assert_fields(value, "Fleet", "id name project_name spec created_at status instances");
    assert_uuid_v4(&value["id"]);
    assert_time(&value["created_at"]);
    assert_one_of(&value["status"], "submitted active terminating terminated failed");
    assert_fields(&value["spec"], "FleetSpec", "configuration profile");
    value["instances"].as_array().unwrap().iter().for_each(assert_instance);
}

#[track_caller]
pub(crate) fn assert_instance(value: &Value) {
    assert_fields(value, "Instance", "id project_name name status created");
    assert!(value["instance_num"].is_i64());
    assert_one_of(&value["status"], "pending provisioning idle busy terminating terminated");
    assert_one_of(&value["health_status"], "healthy warning failure");
    if !value["backend"].is_null() {
        assert_one_of(&value["backend"], "remote kubernetes slurm aws gcp azure");
    }
    assert_time(&value["created"]);
}

#[track_caller]
pub(crate) fn assert_volume(value: &Value) {
    assert_fields(
        value,
        "Volume",
        "id name user project_name configuration created_at last_processed_at status",
    );
    assert!(value["external"].is_boolean() && value["deleted"].is_boolean());
    assert_one_of(&value["status"], "submitted provisioning active failed");
}

#[track_caller]
pub(crate) fn assert_gateway(value: &Value) {
    assert_fields(value, "Gateway", "id name project_name configuration created_at status");
    assert!(value["default"].is_boolean());
    assert_one_of(&value["status"], "submitted provisioning running failed");
}

#[track_caller]
pub(crate) fn assert_user(value: &Value) {
    assert_fields(value, "User", "id username global_role permissions");
    assert!(value["active"].is_boolean() && value["permissions"]["can_create_projects"].is_boolean());
    assert_uuid_v4(&value["id"]);
    assert_one_of(&value["global_role"], "admin user");
}

#[track_caller]
pub(crate) fn assert_project(value: &Value) {
    assert_fields(value, "Project", "project_id project_name owner backends members");
    assert_uuid_v4(&value["project_id"]);
    assert_user(&value["owner"]);
    for member in value["members"].as_array().unwrap() {
        assert_user(&member["user"]);
        assert_one_of(&member["project_role"], "admin manager user");
        assert!(member["permissions"]["can_manage_ssh_fleets"].is_boolean());
    }
}
