//! Sharing between projects: a project exports fleets, gateways and volumes, others import them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CreateRequest {
    pub name: String,
    /// True if every project of the server may use it; requires a global admin.
    #[serde(default)]
    pub is_global: bool,
    #[serde(default)]
    pub importer_projects: Vec<String>,
    #[serde(default)]
    pub exported_fleets: Vec<String>,
    #[serde(default)]
    pub exported_gateways: Vec<String>,
    #[serde(default)]
    pub exported_volumes: Vec<String>,
}

/// Changes of an export; absent ones leave it as it is.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct UpdateRequest {
    pub name: String,
    #[serde(default)]
    pub set_global: bool,
    #[serde(default)]
    pub unset_global: bool,
    #[serde(default)]
    pub add_importer_projects: Vec<String>,
    #[serde(default)]
    pub remove_importer_projects: Vec<String>,
    #[serde(default)]
    pub add_exported_fleets: Vec<String>,
    #[serde(default)]
    pub remove_exported_fleets: Vec<String>,
    #[serde(default)]
    pub add_exported_gateways: Vec<String>,
    #[serde(default)]
    pub remove_exported_gateways: Vec<String>,
    #[serde(default)]
    pub add_exported_volumes: Vec<String>,
    #[serde(default)]
    pub remove_exported_volumes: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct NameRequest {
    pub name: String,
}

/// Ends the import of an export by this project.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeleteImportRequest {
    pub export_name: String,
    pub export_project_name: String,
}

/// A fleet, a gateway or a volume of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExportedResource {
    pub id: Uuid,
    pub name: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Importer {
    pub project_name: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Export {
    pub id: Uuid,
    pub name: String,
    #[serde(default)]
    pub is_global: bool,
    pub imports: Vec<Importer>,
    pub exported_fleets: Vec<ExportedResource>,
    #[serde(default)]
    pub exported_gateways: Vec<ExportedResource>,
    #[serde(default)]
    pub exported_volumes: Vec<ExportedResource>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Exports {
    pub exports: Vec<Export>,
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// An export as the importing project sees it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ImportedExport {
    pub id: Uuid,
    pub name: String,
    pub project_name: String,
    pub exported_fleets: Vec<ExportedResource>,
    #[serde(default)]
    pub exported_gateways: Vec<ExportedResource>,
    #[serde(default)]
    pub exported_volumes: Vec<ExportedResource>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Import {
    pub id: Uuid,
    pub export: ImportedExport,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Imports {
    pub imports: Vec<Import>,
    #[serde(default)]
    pub warnings: Vec<String>,
}
