"""Uploads a file of customers, looks at the check and imports it."""

import pytest

from tests.journeys.conftest import check_width
from tests.support.screenshots import save_screenshot


@pytest.fixture
def people(tmp_path):
    """More than one part, with broken lines and a column without meaning."""
    lines = ["用户ID,姓名,等级,手机号,attributes.城市,attributes.消费:number,标签,备注"]
    lines += [
        f"user-{number},客户{number},vip,138{number:08},上海,{number}.5,老客;{number % 7},x" for number in range(1_200)
    ]
    lines[40] = "user-39,客户39,vip,1.38E+10,上海,很多,老客,x"
    lines[700] = 'user-699,"客户699,vip,1,上海,1,老客,x'
    lines[-1] += "x" * 600_000
    path = tmp_path / "客户名单.csv"
    path.write_bytes("\r\n".join(lines).encode("gb18030"))
    return path


def test_file_is_uploaded_checked_and_imported(ops, people):
    from scheduling.customers.imports import run_import_batch
    from scheduling.models import Customer, CustomerImport

    def finish():
        while run_import_batch(CustomerImport.objects.get().pk):
            pass

    page = ops(group="editor")
    page.goto("/admin/scheduling/customerimport/add/")
    page.set_input_files("#import-file", people)
    save_screenshot(page, "import-upload")
    page.click("button:has-text('上传并检查')")
    page.wait_for_url("**/change/")
    page.wait_for_selector("progress")
    save_screenshot(page, "import-checking")
    finish()
    page.wait_for_selector(".at-tag:has-text('等待决定')")  # the page looks again by itself
    assert "客户1" in page.inner_text("#import")
    check_width(page)
    assert Customer.objects.count() == 0
    save_screenshot(page, "import-preview", full_page=True)

    page.click("button:has-text('开始导入')")
    page.wait_for_selector("progress")
    run_import_batch(CustomerImport.objects.get().pk)
    page.reload()
    save_screenshot(page, "import-progress")
    finish()
    page.wait_for_selector(".at-tag:has-text('已完成')")
    save_screenshot(page, "import-done", full_page=True)
    row = CustomerImport.objects.get()
    assert row.counts == {"lines": 1200, "created": 1197, "changed": 0, "unchanged": 0, "refused": 3}


def test_upload_of_a_file_that_is_too_large_names_the_limit(ops, people):
    from scheduling.customers import imports

    limit, imports.MOST_BYTES = imports.MOST_BYTES, 1_000
    try:
        page = ops("en")
        page.goto("/admin/scheduling/customerimport/add/")
        page.set_input_files("#import-file", people)
        page.click("button:has-text('Upload and check')")
        page.wait_for_selector("[data-problem]:has-text('must be from 1 to 1000 bytes')")
    finally:
        imports.MOST_BYTES = limit
