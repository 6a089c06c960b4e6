"""Validate the fields of a customer that a client, a file or an operator gives, by one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from scheduling.channels.email import is_mail_address
from scheduling.customers.changes import MAX_ADDRESSES
from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput, describe_model_error
from scheduling.ids import find_user_id_problem
from scheduling.policy.profile import (
    MAX_ATTRIBUTES,
    MAX_TAGS,
    check_attribute_name,
    check_characters,
    normalize_tags,
    store_value,
)
from scheduling.policy.send_times import is_time_zone

ADDRESS_KIND = r"^[a-z0-9_.-]{1,64}$"
KIND_RULE = _("must be lower-case letters, digits, “-”, “_” and “.”, at most 64")


def _check_user_id(text: str) -> str:
    if problem := find_user_id_problem(check_characters(text)):
        raise ValueError(problem)
    return text


def _check_timezone(name: str) -> str:
    if name and not is_time_zone(name):
        raise ValueError(_("must be a name of the IANA time zone database, such as Asia/Shanghai"))
    return name


def _check_attribute_name(name: str) -> str:
    check_attribute_name(name)
    return name


def refuse_member(name: str, message: str) -> ValidationError:
    """Return the error of a validator that checks several members, at one of them."""
    problem = PydanticCustomError("refused", "{message}", {"message": message})
    return ValidationError.from_exception_data("", [InitErrorDetails(type=problem, loc=(name,), input=None)])


def _check_email(addresses: dict[str, str | None]) -> dict[str, str | None]:
    if (email := addresses.get("email")) and not is_mail_address(email):
        raise refuse_member("email", _("is not an e-mail address"))
    return addresses


UserId = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_check_user_id)]
AddressKind = Annotated[str, Field(pattern=ADDRESS_KIND), AfterValidator(check_characters)]
Address = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(check_characters)]
AttributeName = Annotated[str, AfterValidator(_check_attribute_name)]
AttributeIn = Annotated[
    Any,
    AfterValidator(lambda value: None if value is None else store_value(value)),
    WithJsonSchema({"anyOf": [{"type": each} for each in ("string", "number", "boolean", "null")]}),
]
Tags = Annotated[list[str], Field(max_length=MAX_TAGS), AfterValidator(normalize_tags)]


class CustomerFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    level: Annotated[str, Field(max_length=40), AfterValidator(check_characters)] = ""
    name: Annotated[str, Field(max_length=200), AfterValidator(check_characters)] = ""
    locale: Annotated[str, Field(max_length=20), AfterValidator(check_characters)] = ""
    timezone: Annotated[str, Field(max_length=60), AfterValidator(_check_timezone)] = ""
    opted_out: bool = False
    addresses: Annotated[
        dict[AddressKind, Address | None], Field(max_length=2 * MAX_ADDRESSES), AfterValidator(_check_email)
    ] = {}
    attributes: Annotated[dict[AttributeName, AttributeIn], Field(max_length=2 * MAX_ATTRIBUTES)] = {}
    tags: Tags = []

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Return the checked values.

        Raises:
            InvalidInput: fields are named like `addresses.email`.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            raise InvalidInput(
                *(FieldError(".".join(map(str, each["loc"][:2])), _describe_error(each)) for each in found)
            ) from None

    def list_given(self) -> dict[str, Any]:
        """Return the given fields, as `CustomerInput` has them."""
        return {name: getattr(self, name) for name in self.model_fields_set - {"user_id"}}


def _describe_error(error: Mapping[str, Any]) -> str:
    """Return the message of an error of the model, as a page can translate it."""
    context = error.get("ctx", {})
    match error["type"]:
        case "refused":
            return str(context["message"])
        case "string_too_short":
            return _("is missing")
        case "string_too_long":
            return _("must not be longer than %(most)s characters", most=context["max_length"])
        case "string_pattern_mismatch":  # only kinds of addresses have a pattern
            return KIND_RULE
        case "too_long":
            return _("must not have more than %(most)s entries", most=context["max_length"])
    return describe_model_error(error)
