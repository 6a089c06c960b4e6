"""Store how people get in: invitations, second factors, identities of a provider, and open sign-ins."""

from __future__ import annotations

from scheduling.models.people.factor import RecoveryCode, TotpDevice
from scheduling.models.people.invitation import Invitation, Role
from scheduling.models.people.sign_in import IdentityLink, SignIn

__all__ = ["IdentityLink", "Invitation", "RecoveryCode", "Role", "SignIn", "TotpDevice"]
