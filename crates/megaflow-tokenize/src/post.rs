//! Post-processors that put fixed tokens around a text.

use serde_json::Value;

/// Ids around a text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Surround {
    pub(crate) before: Vec<u32>,
    pub(crate) after: Vec<u32>,
}

impl Surround {
    /// From a `post_processor`; `None` if it does anything else.
    pub(crate) fn from_value(value: &Value) -> Option<Self> {
        if value.is_null() {
            return Some(Self::default());
        }
        match value["type"].as_str()? {
            "ByteLevel" => Some(Self::default()), // changes offsets only
            "TemplateProcessing" => Self::from_template(value),
            "Sequence" => {
                // Each processor works on the result of the one before.
                value["processors"].as_array()?.iter().try_fold(Self::default(), |around, processor| {
                    let Self { mut before, after } = Self::from_value(processor)?;
                    before.extend(around.before);
                    Some(Self { before, after: [around.after, after].concat() })
                })
            }
            _ => None,
        }
    }

    fn from_template(value: &Value) -> Option<Self> {
        let mut around = Self::default();
        let mut seen = false;
        for piece in value["single"].as_array()? {
            if let Some(id) = piece["SpecialToken"]["id"].as_str() {
                let ids = value["special_tokens"][id]["ids"].as_array()?;
                let side = if seen { &mut around.after } else { &mut around.before };
                for id in ids {
                    side.push(id.as_u64().and_then(|id| u32::try_from(id).ok())?);
                }
            } else if piece["Sequence"]["id"] == "A" && !seen {
                seen = true;
            } else {
                return None;
            }
        }
        seen.then_some(around)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_puts_its_tokens_around_the_text() {
        let template = serde_json::json!({"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
            {"type": "TemplateProcessing",
             "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}}}]});
        assert_eq!(Surround::from_value(&template), Some(Surround { before: vec![7], after: vec![] }));
        assert_eq!(Surround::from_value(&serde_json::json!({"type": "BertProcessing"})), None);
    }
}
